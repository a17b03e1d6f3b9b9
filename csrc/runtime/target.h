// What a GPU is to functions that decide: whether a kernel fits, its tile, its split, its cost.
//
// They take a shape and a Target and never ask a device, so that they answer for any GPU on any
// machine. Python's twin is cnn_engine/target.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/shape.h"

namespace cnn_engine {

struct Target {
  int architecture;               // ten times the compute capability: 90
  int multiprocessors;            // that share the blocks of a launch
  int shared_per_block;           // bytes of shared memory that a block may ask for
  int shared_per_multiprocessor;  // bytes
  int largest_cluster;            // blocks of a thread block cluster; 1: there are none
  int dependent_launch;           // 1: csrc/cuda/common's code has clusters and dependent launches
  std::int64_t l2_bytes;
  double memory_bandwidth;  // bytes per second
  double clock;             // Hz, the highest
  // Multiprocessors of each group (GPC), in which a cluster's blocks stay; zeros: not known.
  static constexpr int kMostGroups = 12;
  int groups[kMostGroups];

  // Clusters of `blocks` that run at once, where a multiprocessor has registers for `together` of
  // the blocks, of so many bytes of shared memory each; 0: none that large.
  int clusters_at_once(int blocks, int together, int shared_bytes) const {
    constexpr int kOfSystem = 1024;  // bytes of each block
    if (blocks > largest_cluster || shared_bytes > shared_per_block) return 0;
    const int each = std::min(together, shared_per_multiprocessor / (shared_bytes + kOfSystem));
    if (groups[0] == 0) return multiprocessors * each / blocks;
    int clusters = 0;
    for (const int group : groups) clusters += group * each / blocks;
    return clusters;
  }

  void validate() const {
    require_at_least("architecture", architecture, 0);
    require_at_least("multiprocessors", multiprocessors, 0);
    require_at_least("shared memory per block", shared_per_block, 0);
    require_at_least("shared memory per multiprocessor", shared_per_multiprocessor, 0);
    require_at_least("largest cluster", largest_cluster, 1);
    require_at_least("L2 cache", l2_bytes, 0);
  }
};

}  // namespace cnn_engine
