// The profile's table, filled by callbacks of the OpenACC runtime (contract: openacc/profile.h).
#include "openacc/profile.h"

#include <acc_prof.h>

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "openacc/site.h"

namespace cnn_engine::openacc {

Site& current_site() {
  static thread_local Site site;
  return site;
}

namespace {

// Events come in pairs, a start and an end, on the thread that meets the directive.
struct Pair {
  acc_event_t start, end;
  const char* kind;
  const char* event;
};

constexpr Pair kPairs[] = {
    {acc_ev_compute_construct_start, acc_ev_compute_construct_end, "region",
     "acc_compute_construct"},
    {acc_ev_enqueue_launch_start, acc_ev_enqueue_launch_end, "kernel", "acc_enqueue_launch"},
    {acc_ev_enter_data_start, acc_ev_enter_data_end, "data", "acc_enter_data"},
    {acc_ev_exit_data_start, acc_ev_exit_data_end, "data", "acc_exit_data"},
    {acc_ev_enqueue_upload_start, acc_ev_enqueue_upload_end, "copyin", "acc_enqueue_upload"},
    {acc_ev_enqueue_download_start, acc_ev_enqueue_download_end, "copyout", "acc_enqueue_download"},
    {acc_ev_wait_start, acc_ev_wait_end, "wait", "acc_wait"},
};
constexpr int kPairCount = sizeof(kPairs) / sizeof(kPairs[0]);

using Key = std::tuple<std::string, int, std::string, std::string, std::string>;

struct Table {
  std::mutex mutex;
  std::map<Key, ProfileRow> rows;
  bool registered = false, counting = false;
};

Table& table() {
  static Table* instance = new Table;  // callbacks may come while the process ends
  return *instance;
}

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Events that have begun in this thread, each inside the one before it.
struct Open {
  int pair;
  double start, inside;  // `inside`: seconds of the events within it that have ended
};
thread_local std::vector<Open> begun;

// A construct's own bringing of its scalars is no region that the program asks for.
inline bool is_implicit(const acc_event_info* event) { return event->other_event.implicit != 0; }

const char* or_empty(const char* text) { return text ? text : ""; }

void add(int pair, double seconds, double exclusive, const acc_prof_info* info,
         const acc_event_info* event) {
  const Site& site = current_site();
  const bool told = info->src_file != nullptr && info->line_no > 0;  // nvc does; libgomp does not
  ProfileRow row;
  row.event = kPairs[pair].event;
  row.kind = kPairs[pair].kind;
  if (row.kind == "data" && is_implicit(event)) row.kind = "implicit";
  row.file = told ? info->src_file : site.file;
  row.function = told ? or_empty(info->func_name) : site.function;
  row.line = told ? info->line_no : site.line;
  const acc_event_t type = info->event_type;
  if (type == acc_ev_enqueue_launch_end) {
    row.kernel = or_empty(event->launch_event.kernel_name);
    row.gangs = event->launch_event.num_gangs;
    row.workers = event->launch_event.num_workers;
    row.vector = event->launch_event.vector_length;
  } else if (type == acc_ev_enqueue_upload_end || type == acc_ev_enqueue_download_end) {
    row.bytes = static_cast<std::int64_t>(event->data_event.bytes);
    row.variable = or_empty(event->data_event.var_name);
  }
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (!all.counting) return;
  const Key key(row.file, row.line, row.event + row.kind, row.kernel, row.variable);
  auto [found, fresh] = all.rows.try_emplace(key, row);
  ProfileRow& kept = found->second;
  if (!fresh) kept.bytes += row.bytes;
  kept.min_s = fresh || seconds < kept.min_s ? seconds : kept.min_s;
  kept.max_s = seconds > kept.max_s ? seconds : kept.max_s;
  kept.excl_min_s = fresh || exclusive < kept.excl_min_s ? exclusive : kept.excl_min_s;
  kept.excl_max_s = exclusive > kept.excl_max_s ? exclusive : kept.excl_max_s;
  kept.total_s += seconds;
  kept.excl_s += exclusive;
  kept.count += 1;
}

void on_event(acc_prof_info* info, acc_event_info* event, acc_api_info*) {
  const double at = now();
  for (int pair = 0; pair < kPairCount; ++pair) {
    if (info->event_type == kPairs[pair].start) {
      begun.push_back({pair, at, 0});
      return;
    }
    if (info->event_type == kPairs[pair].end) {
      if (begun.empty() || begun.back().pair != pair) return;  // began before the profile
      const double seconds = at - begun.back().start, inside = begun.back().inside;
      begun.pop_back();
      if (!begun.empty()) begun.back().inside += seconds;
      add(pair, seconds, seconds - inside, info, event);
      return;
    }
  }
}

}  // namespace

void start_profile() {
  Table& all = table();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.rows.clear();
    all.counting = true;
    if (all.registered) return;
    all.registered = true;
  }
  for (const Pair& pair : kPairs) {
    acc_prof_register(pair.start, on_event, acc_reg);
    acc_prof_register(pair.end, on_event, acc_reg);
  }
}

std::vector<ProfileRow> stop_profile() {
  Table& all = table();
  bool registered = false;
  std::vector<ProfileRow> rows;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& entry : all.rows) rows.push_back(entry.second);
    all.counting = false;
    registered = all.registered;
    all.registered = false;
  }
  if (registered) {
    for (const Pair& pair : kPairs) {
      acc_prof_unregister(pair.start, on_event, acc_reg);
      acc_prof_unregister(pair.end, on_event, acc_reg);
    }
  }
  return rows;
}

}  // namespace cnn_engine::openacc
