// What ran, through OpenACC's profiling interface (acc_prof.h): events of the runtime, counted and
// timed for each directive.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cnn_engine::openacc {

// All events of one kind at one directive.
struct ProfileRow {
  // "region": a compute construct; "kernel": a launch on a GPU; "data": a data region's beginning
  // or end, "implicit" where a construct has it for itself; "copyin", "copyout": a transfer;
  // "wait": for the device.
  std::string kind;
  std::string event;  // as the interface calls it, without "_start" and "_end"
  std::string file, function;
  int line = 0;
  std::string kernel;    // its name, of a launch
  std::string variable;  // what is copied, where the runtime says so
  std::uint64_t gangs = 0, workers = 0, vector = 0;
  std::int64_t count = 0;
  std::int64_t bytes = 0;  // of transfers
  double total_s = 0, min_s = 0, max_s = 0;
  double excl_s = 0, excl_min_s = 0, excl_max_s = 0;  // without the events inside
};

// Empties the table and begins to count, until `stop_profile`, in every thread.
void start_profile();
// Ends it and returns the table, by file and line.
std::vector<ProfileRow> stop_profile();

}  // namespace cnn_engine::openacc
