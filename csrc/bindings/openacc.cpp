// The module cnn_engine._openacc: operators in OpenACC directives, data regions, the profile, and
// what the compiler said of the directives.
#include "bindings/operators.h"
#include "openacc/data.h"
#include "openacc/listing.h"
#include "openacc/operators.h"
#include "openacc/profile.h"

namespace cnn_engine::bindings {
namespace {

void add_operators(py::module_& module) {
#define CNN_ENGINE_BIND(name) bind<OnHost>(module, #name, +[] { return &openacc::name; })
  CNN_ENGINE_BIND(conv2d);
  CNN_ENGINE_BIND(pad2d);
  CNN_ENGINE_BIND(relu);
  CNN_ENGINE_BIND(tanh);
  CNN_ENGINE_BIND(normalize);
  CNN_ENGINE_BIND(max_pool2d);
  CNN_ENGINE_BIND(linear);
  CNN_ENGINE_BIND(softmax);
  CNN_ENGINE_BIND(create);
  CNN_ENGINE_BIND(copyin);
  CNN_ENGINE_BIND(remove);
  CNN_ENGINE_BIND(enter);
  CNN_ENGINE_BIND(leave);
  CNN_ENGINE_BIND(copy_h2d);
  CNN_ENGINE_BIND(copy_d2h);
  CNN_ENGINE_BIND(copy_d2d);
  CNN_ENGINE_BIND(device_count);
  CNN_ENGINE_BIND(free_memory);
  CNN_ENGINE_BIND(probe);
#undef CNN_ENGINE_BIND
}

py::list stop_profile() {
  py::list rows;
  for (const openacc::ProfileRow& row : openacc::stop_profile()) {
    py::dict one;
    one["kind"] = row.kind;
    one["event"] = row.event;
    one["file"] = row.file;
    one["line"] = row.line;
    one["function"] = row.function;
    one["kernel"] = row.kernel;
    one["variable"] = row.variable;
    one["gangs"] = row.gangs;
    one["workers"] = row.workers;
    one["vector"] = row.vector;
    one["count"] = row.count;
    one["bytes"] = row.bytes;
    one["total_s"] = row.total_s;
    one["min_s"] = row.min_s;
    one["max_s"] = row.max_s;
    one["excl_s"] = row.excl_s;
    one["excl_min_s"] = row.excl_min_s;
    one["excl_max_s"] = row.excl_max_s;
    rows.append(one);
  }
  return rows;
}

py::list listings() {
  py::list files;
  for (int i = 0; i < openacc::listing_count; ++i) {
    const openacc::Listing& one = openacc::listings[i];
    py::dict file;
    file["file"] = one.file;
    file["source"] = one.source;
    file["mapping"] = one.mapping;
    file["offload_mapping"] = one.offload_mapping;
    files.append(file);
  }
  return files;
}

}  // namespace

PYBIND11_MODULE(_openacc, module) {
  module.doc() = "Operators in OpenACC directives; called by cnn_engine.devices.openacc.";
  py::module_::import("cnn_engine._cpu");  // where the shapes are registered
  add_operators(module);
  module.attr("HOST") = openacc::kHost;
  module.attr("compiler") = CNN_ENGINE_OPENACC_COMPILER;
  module.attr("offload") = CNN_ENGINE_OPENACC_OFFLOAD;  // the target, or ""
  module.attr("why_not_offload") = CNN_ENGINE_OPENACC_WHY_NOT_OFFLOAD;
  module.attr("shape") = CNN_ENGINE_OPENACC_SHAPE;  // of the convolutions' launches
  module.def("listings", &listings);
  module.def("start_profile", &openacc::start_profile);
  module.def("stop_profile", &stop_profile);
}

}  // namespace cnn_engine::bindings
