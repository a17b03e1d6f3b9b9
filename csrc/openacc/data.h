// Where data lives: memory of a device beside that of the host, by OpenACC's data directives.
//
// A tensor has one address, the host's. `create` and `copyin` open a data region for it that lasts
// until `remove`; between them the loop nests find it with `present`. On the host device there is
// no other memory: the directives are passed over, and an address is itself.
#pragma once

#include <cstdint>

namespace cnn_engine::openacc {

// Makes `device` that of the calling thread. Called by every function that takes a device.
void select(int device);

void create(const char* at, std::int64_t nbytes, int device);  // enter data create
void copyin(const char* at, std::int64_t nbytes, int device);  // enter data copyin
void remove(const char* at, std::int64_t nbytes, int device);  // exit data delete

// The data mode `transfer`: a region for one convolution alone. `enter` brings its input and makes
// room for its output; `leave` brings the output back and frees both.
void enter(const char* input, std::int64_t input_bytes, const char* output,
           std::int64_t output_bytes, int device);
void leave(const char* input, std::int64_t input_bytes, char* output, std::int64_t output_bytes,
           int device);

// Copies between memory of the host alone and memory that is present, as the device has it.
void copy_h2d(const char* to, const char* from, std::int64_t nbytes, int device);
void copy_d2h(char* to, const char* from, std::int64_t nbytes, int device);
void copy_d2d(const char* from, char* to, std::int64_t nbytes, int device);  // both present

// GPUs that the OpenACC runtime offers; 0 where it has none, for whatever reason.
int device_count();
// Bytes of a GPU that are free, or 0 where the runtime does not say.
std::int64_t free_memory(int device);
// Runs a loop on `device` and returns whether it ran there. The runtime ends the process where it
// cannot run at all, so this is asked in a process of its own.
bool probe(int device);

}  // namespace cnn_engine::openacc
