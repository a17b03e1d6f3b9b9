// The module cnn_engine._cuda: CUDA operators on a stream, and what the runtime says of the
// devices.
//
// It links cudart statically, which looks for the driver when first called: the module imports, and
// says that there is no device, on a machine without one.
#include <cuda_runtime_api.h>

#include <optional>
#include <system_error>

#include "bindings/no_gil.h"
#include "bindings/operators.h"
#include "bindings/program_headers.h"
#include "cuda/common/target.h"
#include "runtime/capture.h"
#include "runtime/check.h"
#include "runtime/delay.h"
#include "runtime/device.h"
#include "runtime/file_reader.h"
#include "runtime/prefetch.h"

namespace cnn_engine::bindings {

void add_fused(py::module_& module);  // fused_cuda.cpp

namespace {

// Makes the device of the last argument, a stream, current; what returns a value launches nothing,
// and is called as it is: it may ask the current device, which the caller makes the right one. The
// interpreter's lock is kept: a launch takes microseconds, and to have the lock back from another
// thread can take milliseconds.
class OnItsDevice {
 public:
  OnItsDevice(const Arguments& arguments, bool launches) {
    if (launches)
      guard_.emplace(reinterpret_cast<Stream>(arguments[arguments.count - 1].cast<Address>()));
  }

 private:
  std::optional<cuda::DeviceGuard> guard_;
};

void add_operators(py::module_& module) {
#define CNN_ENGINE_CUDA_OPERATOR(name) \
  bind<OnItsDevice>(module, #name, +[] { return &cuda::name; });
#include "ops/operators.def"
}

// The number of devices, and why there are none.
py::tuple device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return py::make_tuple(count, "");
  cudaGetLastError();  // not to be reported again by the next call
  return py::make_tuple(0, std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
}

py::dict device_properties(int device) {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  py::dict result;
  result["name"] = std::string(properties.name);
  result["compute_capability"] = py::make_tuple(properties.major, properties.minor);
  result["multiprocessors"] = properties.multiProcessorCount;
  result["total_memory"] = properties.totalGlobalMem;
  result["cache_bytes"] = properties.l2CacheSize;
  int clock_khz = 0;  // no longer among the properties from CUDA 13 on
  CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
  result["clock_hz"] = 1e3 * clock_khz;  // the highest that it reaches
  result["managed_memory"] = properties.managedMemory != 0;
  result["concurrent_managed_access"] = properties.concurrentManagedAccess != 0;
  return result;
}

// What cnn_engine.target's Target has of a device; makes a context there.
py::dict device_target(int device) {
  const Target& target = cuda::target_of(device);
  py::dict result;
  result["multiprocessors"] = target.multiprocessors;
  result["shared_per_block"] = target.shared_per_block;
  result["shared_per_multiprocessor"] = target.shared_per_multiprocessor;
  result["largest_cluster"] = target.largest_cluster;
  result["l2_bytes"] = target.l2_bytes;
  result["memory_bandwidth"] = target.memory_bandwidth;
  result["clock"] = target.clock;
  py::list groups;
  for (const int group : target.groups) {
    if (group > 0) groups.append(group);
  }
  result["groups"] = py::tuple(groups);
  return result;
}

// What programs that are compiled at first use include: name -> text.
py::dict program_headers() {
  py::dict all;
  for (const ProgramHeader* header = kProgramHeaders; header->name != nullptr; ++header) {
    all[header->name] = header->text;
  }
  return all;
}

// Folder of csrc/cuda -> the architectures that its kernels were compiled for, as CMake has them.
py::dict folders() {
  py::dict result;
#define CNN_ENGINE_FOLDER(name, architectures) result[#name] = architectures;
  CNN_ENGINE_CUDA_FOLDERS
#undef CNN_ENGINE_FOLDER
  return result;
}

// A device with a context to ask of addresses, which are the process's, where the thread has none:
// the runtime would make one on its first device. -1 where no device has one.
int active_device() {
  using Ask = CUresult (*)(CUdevice, unsigned*, int*);
  static const auto ask = cuda::driver_function<Ask>("cuDevicePrimaryCtxGetState", 7000);
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  for (int device = 0; device < count; ++device) {
    unsigned flags = 0;
    int active = 0;
    cuda::Contexts::check(ask(device, &flags, &active), "cuDevicePrimaryCtxGetState");
    if (active != 0) return device;
  }
  return -1;
}

// The device that an address belongs to, or -1 for ordinary host memory.
int pointer_device(Address address) {
  std::optional<cuda::DeviceGuard> guard;
  CUcontext current = nullptr;
  cuda::Contexts::check(cuda::Contexts::all().current(&current), "cuCtxGetCurrent");
  if (current == nullptr) {
    const int device = active_device();
    if (device < 0) return -1;
    guard.emplace(device);
  }
  cudaPointerAttributes attributes;
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, in<void>(address)));
  return attributes.type == cudaMemoryTypeUnregistered ? -1 : attributes.device;
}

// Queues a copy to or from page-locked memory. The interpreter's lock is kept, as by a launch.
void queue_copy(Address to, Address source, std::size_t nbytes, Address stream) {
  CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(to), in<void>(source), nbytes,
                             cudaMemcpyDefault, reinterpret_cast<cudaStream_t>(stream)));
}

std::size_t read_file(cuda::FileReader& reader, int descriptor, off_t offset, std::size_t nbytes,
                      Address to) {
  int error = 0;
  try {
    const NoGil released;
    return reader.read(descriptor, offset, nbytes, reinterpret_cast<void*>(to));
  } catch (const std::system_error& failed) {
    error = failed.code().value();
  }
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

// What tells a stream from all others, of which the driver hands out handles again; -1 for one that
// is captured.
PyObject* stream_id(PyObject*, PyObject* handle) {
  const std::size_t number = PyLong_AsSize_t(handle);
  if (number == static_cast<std::size_t>(-1) && PyErr_Occurred() != nullptr) return nullptr;
  const auto stream = reinterpret_cast<cudaStream_t>(number);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaError_t failed = cudaStreamIsCapturing(stream, &status);
  if (failed == cudaSuccess && status != cudaStreamCaptureStatusNone) return PyLong_FromLong(-1);
  if (failed == cudaSuccess) failed = cudaStreamGetId(stream, &id);
  if (failed == cudaSuccess) return PyLong_FromUnsignedLongLong(id);
  cudaGetLastError();
  PyErr_Format(PyExc_RuntimeError, "stream %#zx: %s: %s", number, cudaGetErrorName(failed),
               cudaGetErrorString(failed));
  return nullptr;
}

PyMethodDef stream_id_method = {"stream_id", stream_id, METH_O,
                                "A number that no other stream has had; -1: it is captured."};

// How this thread's calls that a capture forbids are taken; returns how they were before.
int exchange_capture_mode(int mode) {
  auto changed = static_cast<cudaStreamCaptureMode>(mode);
  CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&changed));
  return changed;
}

void push_device(int device) {
  cuda::Contexts::check(cuda::Contexts::all().push(cuda::context_of(device)), "cuCtxPushCurrent");
}

void pop_device() {
  CUcontext popped;
  cuda::Contexts::check(cuda::Contexts::all().pop(&popped), "cuCtxPopCurrent");
}

// Lets threads that wait for a device sleep, where they keep a core busy by default.
void sleep_while_waiting(int device) {
  const cuda::DeviceGuard guard(device);
  CUDA_CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
}

// Why the kernels here cannot run on a device, or "": the smallest of them is tried.
std::string kernels_error(int device) {
  try {
    const cuda::DeviceGuard guard(device);
    cuda::delay(0, nullptr);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  } catch (const cuda::Error& error) {
    cudaGetLastError();  // not to be reported again by the next call
    return error.what();
  }
  return "";
}

int version(cudaError_t (*query)(int*)) {
  int value = 0;
  CUDA_CHECK(query(&value));
  return value;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA operators on a stream; called by cnn_engine.ops, which checks.";
  py::module_::import("cnn_engine._cpu");  // where the shapes are registered
  py::register_exception<cuda::Error>(module, "CudaError",
                                      py::module_::import("cnn_engine.errors").attr("DeviceError"));
  add_operators(module);
  add_fused(module);
  module.attr("architectures") = CNN_ENGINE_CUDA_ARCHITECTURES;
  module.attr("folders") = folders();
  module.attr("program_headers") = program_headers();
  module.attr("compiler") = CNN_ENGINE_CUDA_COMPILER;
  bind<OnItsDevice>(module, "delay", +[] { return &cuda::delay; });
  bind<OnItsDevice>(module, "prefetch", +[] { return &cuda::prefetch; });
  module.def("device_count", &device_count);
  module.def("device_properties", &device_properties);
  module.def("device_target", &device_target);
  module.def("pointer_device", &pointer_device);
  module.def("kernels_error", &kernels_error);
  module.def("queue_copy", &queue_copy);
  const py::object named = module.attr("__name__");
  module.attr("stream_id") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&stream_id_method, nullptr, named.ptr()));
  module.def("capture_id",
             [](Address stream) { return cuda::Capture(reinterpret_cast<Stream>(stream)).id; });
  module.def("hold_in_graph", [](Address stream, std::uint64_t number) {
    cuda::Released::hold(reinterpret_cast<Stream>(stream), number);
  });
  module.def("released_by_graphs", [] {
    py::list numbers;
    for (const std::uint64_t number : cuda::Released::take()) numbers.append(number);
    return numbers;
  });
  module.attr("relaxed_capture_mode") = static_cast<int>(cudaStreamCaptureModeRelaxed);
  module.def("exchange_capture_mode", &exchange_capture_mode);
  module.def("push_device", &push_device);
  module.def("pop_device", &pop_device);
  // Functions in a row, from code that was compiled for the current device; `address` is what
  // pointwise_compiled takes.
  py::class_<cuda::PointwiseProgram>(module, "PointwiseProgram")
      .def(py::init([](const py::bytes& code) { return cuda::PointwiseProgram(code); }))
      .def_property_readonly("address", [](const cuda::PointwiseProgram& program) {
        return reinterpret_cast<Address>(&program);
      });
  py::class_<cuda::FileReader>(module, "FileReader")
      .def(py::init<int, int, std::size_t>(), py::arg("device"), py::arg("threads"),
           py::arg("piece"))
      .def("read", &read_file, py::arg("descriptor"), py::arg("offset"), py::arg("nbytes"),
           py::arg("to"));
  module.def("sleep_while_waiting", &sleep_while_waiting);
  module.def("driver_version", [] { return version(&cudaDriverGetVersion); });
  module.def("runtime_version", [] { return version(&cudaRuntimeGetVersion); });
  module.def("get_device", [] { return version(&cudaGetDevice); });
  module.def("set_device", [](int device) { CUDA_CHECK(cudaSetDevice(device)); });
}

}  // namespace cnn_engine::bindings
