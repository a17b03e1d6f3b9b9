// Binds what ops/operators.def lists: a Python function from the type of a C++ one, a Python class
// from the members of a shape. Nothing here names an operator.
#pragma once

#include <array>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/address.h"
#include "bindings/no_gil.h"
#include "ops/operators.h"
#include "runtime/floating_point.h"

namespace cnn_engine::bindings {

// ---- functions ----

// The arguments of a call.
struct Arguments {
  PyObject* const* all;
  std::size_t count;

  py::handle operator[](std::size_t i) const { return all[i]; }
};

// Structs whose members Python passes one after another, and arrays of them; all other structs are
// bound classes.
template <typename T, typename = void>
constexpr bool kPassedByMember = false;
template <typename T>
constexpr bool kPassedByMember<T, std::enable_if_t<T::kPassedByMember>> = true;
template <typename T, std::size_t n>
constexpr bool kPassedByMember<std::array<T, n>, void> = true;

// Stands for a member of any type, to count an aggregate's members.
struct AnyMember {
  template <typename T>
  operator T() const;
};

template <std::size_t>
using AnyMemberAt = AnyMember;

template <typename Aggregate, std::size_t... I>
constexpr auto takes(std::index_sequence<I...>)
    -> decltype(Aggregate{std::declval<AnyMemberAt<I>>()...}, bool()) {
  return true;
}
template <typename Aggregate>
constexpr bool takes(...) {
  return false;
}

template <typename Aggregate, std::size_t count = 1>
constexpr std::size_t count_members() {
  if constexpr (takes<Aggregate>(std::make_index_sequence<count>())) {
    return count_members<Aggregate, count + 1>();
  } else {
    return count - 1;
  }
}

// Returns an aggregate made of so many members, from the first to the last.
template <typename Aggregate, typename Make, std::size_t... I>
constexpr Aggregate fill(const Make& make, std::index_sequence<I...>) {
  return Aggregate{make(I)...};
}

template <typename T>
constexpr std::size_t count_arguments();

struct CountedMember {
  std::size_t* total;

  template <typename T>
  constexpr operator T() const {
    *total += count_arguments<T>();
    return T();
  }
};

// Python's arguments that one parameter is made of.
template <typename T>
constexpr std::size_t count_arguments() {
  if constexpr (kPassedByMember<T>) {
    std::size_t total = 0;
    const auto count = [&total](std::size_t) constexpr {
      return CountedMember{&total};
    };
    fill<T>(count, std::make_index_sequence<count_members<T>()>());
    return total;
  } else {
    return 1;
  }
}

template <typename Parameter>
decltype(auto) from_python(const Arguments& arguments, std::size_t& at);

struct NextMember {
  const Arguments& arguments;
  std::size_t& at;

  template <typename T>
  operator T() const {
    return from_python<T>(arguments, at);
  }
};

template <typename T, typename = void>
constexpr bool kIsValidated = false;
template <typename T>
constexpr bool kIsValidated<T, std::void_t<decltype(std::declval<const T&>().validate())>> = true;

// What Python passes for a parameter, from argument `at` on, which moves past it: an integer for a
// pointer (a stream's handle too), the bound object for a shape, and the value itself for numbers,
// bools and enumerations.
template <typename Parameter>
decltype(auto) from_python(const Arguments& arguments, std::size_t& at) {
  using Value = std::remove_cv_t<std::remove_reference_t<Parameter>>;
  if constexpr (kPassedByMember<Value>) {
    const auto next = [&](std::size_t) {
      return NextMember{arguments, at};
    };
    const Value value = fill<Value>(next, std::make_index_sequence<count_members<Value>()>());
    if constexpr (kIsValidated<Value>) value.validate();
    return value;
  } else if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<Value>(arguments[at++].cast<Address>());
  } else {
    return arguments[at++].cast<Parameter>();
  }
}

// A function whose type is forgotten. pybind11's own dispatch, compiled for each, would take longer
// than most kernels, and a call several hundred nanoseconds longer.
struct Bound {
  PyMethodDef method;
  std::size_t arguments;
  void (*get)();
  py::object (*call)(void (*get)(), const Arguments& arguments);
};

// The Guard of functions that compute on the host.
struct OnHost {
  OnHost(const Arguments&, bool) {}

  NoGil released;
  FloatingPointMode mode;
};

// How functions of one type are called.
template <typename Guard, typename Result, typename... Parameters>
struct Call {
  using Function = Result (*)(Parameters...);

  static Result run(Function function, const Arguments& arguments, Parameters... converted) {
    const Guard guard(arguments, std::is_void_v<Result>);
    return function(converted...);
  }
  // Where each parameter's arguments begin, and how many there are.
  static constexpr auto first_arguments() {
    const std::size_t counts[] = {
        count_arguments<std::remove_cv_t<std::remove_reference_t<Parameters>>>()..., 0};
    std::array<std::size_t, sizeof...(Parameters) + 1> first{};
    for (std::size_t i = 0; i < sizeof...(Parameters); ++i) first[i + 1] = first[i] + counts[i];
    return first;
  }
  template <std::size_t... I>
  static Result convert(Function function, const Arguments& arguments, std::index_sequence<I...>) {
    auto at = first_arguments();
    return run(function, arguments, from_python<Parameters>(arguments, at[I])...);
  }
  static py::object call(void (*get)(), const Arguments& arguments) {
    const Function function = reinterpret_cast<Function (*)()>(get)();
    const std::index_sequence_for<Parameters...> all;
    if constexpr (std::is_void_v<Result>) {
      convert(function, arguments, all);
      return py::none();
    } else {
      return py::cast(convert(function, arguments, all));
    }
  }
};

inline py::object call(const Bound& bound, const Arguments& arguments) {
  const auto name = [&] {
    return std::string(bound.method.ml_name);
  };
  if (arguments.count != bound.arguments) {
    throw py::type_error(name() + ": expected " + std::to_string(bound.arguments) +
                         " arguments, found " + std::to_string(arguments.count));
  }
  try {
    return bound.call(bound.get, arguments);
  } catch (const py::cast_error&) {
  } catch (const py::reference_cast_error&) {  // None in the place of a shape
  }
  py::list found;
  for (std::size_t i = 0; i < arguments.count; ++i) found.append(arguments[i]);
  throw py::type_error(name() + ": expected arguments of its types, found " +
                       py::repr(found).cast<std::string>());
}

// METH_FASTCALL; `self` holds the Bound.
inline PyObject* call_bound(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return or_stay([&] {
      const auto* bound = static_cast<const Bound*>(PyCapsule_GetPointer(self, nullptr));
      return call(*bound, {arguments, static_cast<std::size_t>(count)}).release().ptr();
    });
  } catch (...) {
    // pybind11 knows which of Python's exceptions it is, and says so when a function of its throws.
    const std::exception_ptr error = std::current_exception();
    try {
      py::cpp_function([error] { std::rethrow_exception(error); })();
    } catch (py::error_already_set& raised) {
      raised.restore();
    }
    return nullptr;
  }
}

// `get` returns the function to call: with the instruction set of the moment, on the CPU. A Guard
// is made of the arguments, and of whether nothing is returned, and lives while the function works.
template <typename Guard, typename Result, typename... Parameters>
void bind(py::module_& module, const char* name, Result (*(*get)())(Parameters...)) {
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_bound));
  auto* const bound = new Bound{{name, function, METH_FASTCALL, nullptr},
                                Call<Guard, Result, Parameters...>::first_arguments().back(),
                                reinterpret_cast<void (*)()>(get),
                                &Call<Guard, Result, Parameters...>::call};  // as long as Python
  const py::capsule self(bound);
  const py::object module_name = module.attr("__name__");
  module.attr(name) = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&bound->method, self.ptr(), module_name.ptr()));
}

// ---- shapes ----

// One of Python's values, for a member of any type.
struct Member {
  py::handle value;

  template <typename T>
  operator T() const {
    try {
      return value.cast<T>();
    } catch (const py::cast_error&) {
      throw py::type_error("expected a number that fits, found " +
                           py::repr(value).cast<std::string>());
    }
  }
};

// Members that may be left out, the last ones; what they are then, the shape says.
template <typename Shape, typename = void>
constexpr std::size_t kOptionalMembers = 0;
template <typename Shape>
constexpr std::size_t kOptionalMembers<Shape, std::void_t<decltype(Shape::kOptionalMembers)>> =
    Shape::kOptionalMembers;

template <typename Shape, std::size_t count>
Shape make_shape(const py::args& arguments) {
  constexpr std::size_t most = count_members<Shape>();
  if (arguments.size() == count) {
    const auto member = [&](std::size_t i) {
      return Member{PyTuple_GET_ITEM(arguments.ptr(), i)};
    };
    const Shape shape = fill<Shape>(member, std::make_index_sequence<count>());
    shape.validate();  // so that no kernel meets an impossible shape
    return shape;
  }
  if constexpr (count < most) {
    return make_shape<Shape, count + 1>(arguments);
  } else {
    throw py::type_error("expected " + std::to_string(most) + " numbers, found " +
                         std::to_string(arguments.size()));
  }
}

using Property = std::int64_t (*)(py::handle self);

template <typename Shape, typename Get>
constexpr bool has(Get) {
  return std::is_invocable_v<Get, const Shape&>;
}

inline void add_property(const py::object& shape, const char* name, Property get) {
  const py::handle property(reinterpret_cast<PyObject*>(&PyProperty_Type));
  shape.attr(name) = property(py::cpp_function(get, py::is_method(shape)));
}

template <typename Shape>
void bind_shape(py::module_& module, const char* name) {
  constexpr std::size_t least = count_members<Shape>() - kOptionalMembers<Shape>;
  py::class_<Shape> shape(module, name);
  shape.def(
      py::init([](const py::args& arguments) { return make_shape<Shape, least>(arguments); }));
#define CNN_ENGINE_PROPERTY(name)                                                         \
  if constexpr (has<Shape>([](const auto& one) -> decltype(one.name()) { return {}; })) { \
    add_property(shape, #name, [](py::handle self) -> std::int64_t {                      \
      return self.cast<const Shape&>().name();                                            \
    });                                                                                   \
  }
  CNN_ENGINE_PROPERTY(flops);
  CNN_ENGINE_PROPERTY(bytes);
  CNN_ENGINE_PROPERTY(out_h);
  CNN_ENGINE_PROPERTY(out_w);
  CNN_ENGINE_PROPERTY(packed_size);
  CNN_ENGINE_PROPERTY(weight_size);
  CNN_ENGINE_PROPERTY(output_size);
#undef CNN_ENGINE_PROPERTY
}

// ---- enumerations ----

inline py::object name_of_member(py::handle self) {
  for (const auto& [name, value] : py::dict(self.attr("__members__"))) {
    if (value.is(self)) return py::reinterpret_borrow<py::object>(name);
  }
  throw py::value_error("expected a member of its class");
}

inline void add_members(const py::object& bound, const py::dict& members) {
  bound.attr("__members__") = members;
  for (const auto& [name, value] : members) py::setattr(bound, name, value);
  const py::handle property(reinterpret_cast<PyObject*>(&PyProperty_Type));
  bound.attr("name") = property(py::cpp_function(&name_of_member, py::is_method(bound)));
  bound.attr("__repr__") = py::cpp_function(
      [](py::handle self) {
        return py::str("{}.{}").format(py::type::of(self).attr("__name__"), self.attr("name"));
      },
      py::is_method(bound));
}

// A class whose members are its only values. py::enum_, with all that it makes for each, took as
// long to compile as half of everything else here.
template <typename Enum>
void bind_enum(py::module_& module, const char* name) {
  const py::class_<Enum> bound(module, name);
  py::dict members;
  for (int i = 0; name_of(static_cast<Enum>(i)) != nullptr; ++i) {
    members[name_of(static_cast<Enum>(i))] = py::cast(static_cast<Enum>(i));
  }
  add_members(bound, members);
}

}  // namespace cnn_engine::bindings
