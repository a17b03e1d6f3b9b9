// cnn_engine._cpu.FusedNetwork.
#include "ops/fused_cpu.h"

#include <atomic>
#include <exception>
#include <utility>

#include "bindings/description.h"
#include "bindings/no_gil.h"
#include "runtime/floating_point.h"
#include "runtime/thread_pool.h"

namespace cnn_engine::bindings {
namespace {

cpu::FusedDtype dtype_of(const std::string& name) {
  if (name == "float32") return cpu::FusedDtype::float32;
  if (name == "bfloat16") return cpu::FusedDtype::bfloat16;
  throw std::invalid_argument("dtype: expected float32 or bfloat16, found '" + name + "'");
}

// A network, and what computes an image that it leaves out: a Python function of the addresses of
// the image and of its outputs, or None.
struct Fused : cpu::FusedNetwork {
  py::object otherwise;

  // `run` returns the images that were left out.
  template <typename Run>
  void complete(Address images, Address outputs, const Run& run) const {
    std::vector<int> left_out;
    {
      const NoGil released;
      const FloatingPointMode mode;
      left_out = run();
    }
    for (const int i : left_out) {
      if (otherwise.is_none()) {
        throw std::invalid_argument(
            "images: expected finite numbers, found NaN or infinity in "
            "image " +
            std::to_string(i));
      }
      call_python(otherwise, images + i * image_size() * sizeof(float),
                  outputs + i * this->outputs() * sizeof(float));
    }
  }
};

// Threads of the pool in Python. Once the interpreter has begun to end none may be there: they
// would wait for its lock for ever, in an interpreter that is gone.
class Visit {
 public:
  Visit() {
    inside_.fetch_add(1);
    allowed_ = !closed_.load();
    if (!allowed_) inside_.fetch_sub(1);
  }
  ~Visit() {
    if (allowed_) inside_.fetch_sub(1);
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return allowed_; }

  // Lets no more of them in, and waits for those inside, for some seconds at most.
  static void close() {
    closed_.store(true);
    const NoGil released;
    for (int i = 0; i < 5000 && inside_.load() > 0; ++i) usleep(1000);
  }
  // In a forked child there is none of them.
  static void forget() { inside_.store(0); }

 private:
  bool allowed_;
  static std::atomic<int> inside_;
  static std::atomic<bool> closed_;
};

std::atomic<int> Visit::inside_{0};
std::atomic<bool> Visit::closed_{false};

[[maybe_unused]] const int visits_at_fork = pthread_atfork(nullptr, nullptr, &Visit::forget);

struct PythonCall {
  const py::function& body;
  NoGil released{};
  std::exception_ptr error{};  // the first; under the interpreter's lock

  void run(int index) {
    try {
      call_python(body, static_cast<unsigned>(index));
    } catch (const std::exception&) {
      if (!error) error = std::current_exception();
    }
  }

  static void work(void* context, int index) {
    PythonCall& mine = *static_cast<PythonCall*>(context);
    if (index == 0) return mine.released.with_lock([&] { mine.run(0); });
    const Visit visit;
    if (!visit) return;
    or_stay([&] {
      const py::gil_scoped_acquire acquire;
      mine.run(index);
    });
  }
};

void on_threads(int threads, const py::function& body) {
  std::exception_ptr error;
  {
    PythonCall call{body};
    run_on_threads(threads, &PythonCall::work, &call);
    error = std::move(call.error);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

void add_fused(py::module_& module) {
  py::class_<Fused>(module, "FusedNetwork", "A whole network in one call: csrc/ops/fused_cpu.h.")
      .def(py::init([](const py::sequence& shape, float scale, float offset,
                       const py::sequence& layers, const std::string& dtype,
                       const py::object& otherwise) {
             const FloatingPointMode mode;
             return Fused{{describe(shape, scale, offset, layers), dtype_of(dtype)}, otherwise};
           }),
           py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
           py::arg("dtype"), py::arg("otherwise") = py::none(),
           "`otherwise(image, outputs)` is called with the addresses of an image that holds NaN or "
           "infinity and of where its outputs go; without it such images are refused.")
      .def_static(
          "why_not",
          [](const py::sequence& shape, float scale, float offset, const py::sequence& layers,
             const std::string& dtype) {
            return Fused::why_not(describe(shape, scale, offset, layers), dtype_of(dtype));
          },
          py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
          py::arg("dtype"), "Why this CPU does not run the network, or an empty string.")
      .def("run",
           [](const Fused& network, Address images, bool is_uint8, int n, Address outputs,
              int threads) {
             network.complete(images, outputs, [&] {
               return network.run(in<char>(images), is_uint8, n, out(outputs), threads);
             });
           })
      .def(
          "run_timed",
          [](const Fused& network, Address images, bool is_uint8, int n, Address outputs,
             int threads, Address seconds) {
            network.complete(images, outputs, [&] {
              return network.run_timed(in<char>(images), is_uint8, n, out(outputs), threads,
                                       reinterpret_cast<double*>(seconds));
            });
          },
          "As run; adds each part's seconds to the float64 array [len(parts)] at the last address.")
      .def_property_readonly(
          "parts", [](const Fused& network) { return tuples(network.parts()); },
          "Tuples of the indices of the layers that are timed together, in order.")
      .def_property_readonly("outputs", &Fused::outputs)
      .def_property_readonly("instruction_set", &Fused::instruction_set);
  py::module_::import("atexit").attr("register")(py::cpp_function(&Visit::close));
  module.def(
      "on_threads", &on_threads, py::arg("threads"), py::arg("body"),
      "Calls body(0) here and at the same time, as threads of the pool come, body(index) for "
      "others "
      "below `threads`; work is to be claimed in it. Raises what the first of them raised.");
  module.def("measure_fma_peak", &cpu::measure_fma_peak, py::arg("seconds"),
             py::call_guard<NoGil, FloatingPointMode>(),
             "FLOP/s of one core with the selected instruction set.");
}

}  // namespace cnn_engine::bindings
