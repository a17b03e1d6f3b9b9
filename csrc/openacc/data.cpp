// Data regions, copies and the choice of the device (contract: openacc/data.h).
#include "openacc/data.h"

#include <openacc.h>

#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

// The runtime keeps the device for each thread, and pass after pass comes on whichever thread calls
// predict; what it already has costs no call.
void select(int device) {
  constexpr int kNone = -2;
  static thread_local int selected = kNone;
  if (selected == device) return;
  if (device == kHost) {
    acc_set_device_type(acc_device_host);
  } else {
    acc_set_device_num(device, acc_device_nvidia);
  }
  selected = device;
}

void create(const char* at, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc enter data create(at[0 : nbytes])
}

void copyin(const char* at, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc enter data copyin(at[0 : nbytes])
}

void remove(const char* at, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc exit data delete (at[0 : nbytes])
}

void enter(const char* input, std::int64_t input_bytes, const char* output,
           std::int64_t output_bytes, int device) {
  if (input_bytes == 0 || output_bytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc enter data copyin(input[0 : input_bytes]) create(output[0 : output_bytes])
}

void leave(const char* input, std::int64_t input_bytes, char* output, std::int64_t output_bytes,
           int device) {
  if (input_bytes == 0 || output_bytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc exit data copyout(output[0 : output_bytes]) delete (input[0 : input_bytes])
}

void copy_h2d(const char* to, const char* from, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
  acc_memcpy_to_device(acc_deviceptr(const_cast<char*>(to)), const_cast<char*>(from),
                       static_cast<std::size_t>(nbytes));
}

void copy_d2h(char* to, const char* from, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
  acc_memcpy_from_device(to, acc_deviceptr(const_cast<char*>(from)),
                         static_cast<std::size_t>(nbytes));
}

void copy_d2d(const char* from, char* to, std::int64_t nbytes, int device) {
  if (nbytes == 0) return;
  select(device);
  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector present(from[0 : nbytes], to[0 : nbytes])
  for (std::int64_t i = 0; i < nbytes; ++i) to[i] = from[i];
}

int device_count() { return acc_get_num_devices(acc_device_nvidia); }

std::int64_t free_memory(int device) {
  return static_cast<std::int64_t>(
      acc_get_property(device, acc_device_nvidia, acc_property_free_memory));
}

bool probe(int device) {
  select(device);
  constexpr int kElements = 1000;
  int there[kElements] = {};
  const bool host = device == kHost;
#pragma acc parallel loop gang vector copy(there)
  for (int i = 0; i < kElements; ++i) there[i] = acc_on_device(acc_device_not_host) ? 1 : 2;
  for (int i = 0; i < kElements; ++i) {
    if (there[i] != (host ? 2 : 1)) return false;
  }
  return true;
}

}  // namespace cnn_engine::openacc
