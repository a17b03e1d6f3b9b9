// Binds what ops/operators.def lists: a Python function from the type of a C++ one, a Python class
// from the members of a shape. Nothing here names an operator.
#pragma once

#include <type_traits>
#include <utility>

#include "bindings/address.h"
#include "ops/operators.h"

namespace cnn_engine::bindings {

// ---- functions ----

// What Python passes for a parameter: an integer for a pointer (a stream's handle too), a reference
// to the bound object for a shape, and the value itself for numbers, bools and enumerations.
template <typename Parameter>
struct FromPython {
  using Type = Parameter;
  static Type convert(Type value) { return value; }
};
template <typename T>
struct FromPython<T*> {
  using Type = Address;
  static T* convert(Address address) { return reinterpret_cast<T*>(address); }
};

// `get` returns the function to call: with the instruction set of the moment, on the CPU.
template <typename... Guard, typename Get, typename Result, typename... Parameters>
void bind(py::module_& module, const char* name, Get get, Result (*)(Parameters...)) {
  module.def(
      name,
      [get](typename FromPython<Parameters>::Type... arguments) {
        return get()(FromPython<Parameters>::convert(arguments)...);
      },
      Guard()...);
}

// ---- shapes ----

// Stands for a value of any type, to count an aggregate's members and to fill them.
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

template <std::size_t>
using MemberAt = Member;

template <typename Shape, std::size_t... I>
constexpr auto takes(std::index_sequence<I...>)
    -> decltype(Shape{std::declval<MemberAt<I>>()...}, bool()) {
  return true;
}
template <typename Shape>
constexpr bool takes(...) {
  return false;
}

template <typename Shape, std::size_t count = 1>
constexpr std::size_t count_members() {
  if constexpr (takes<Shape>(std::make_index_sequence<count>())) {
    return count_members<Shape, count + 1>();
  } else {
    return count - 1;
  }
}

// Members that may be left out, the last ones; what they are then, the shape says.
template <typename Shape, typename = void>
constexpr std::size_t kOptionalMembers = 0;
template <typename Shape>
constexpr std::size_t kOptionalMembers<Shape, std::void_t<decltype(Shape::kOptionalMembers)>> =
    Shape::kOptionalMembers;

template <typename Shape, std::size_t... I>
Shape fill(const py::args& arguments, std::index_sequence<I...>) {
  return Shape{Member{arguments[I]}...};  // braces: converted from the first to the last
}

template <typename Shape, std::size_t count>
Shape make_shape(const py::args& arguments) {
  constexpr std::size_t most = count_members<Shape>();
  if (arguments.size() == count) {
    const Shape shape = fill<Shape>(arguments, std::make_index_sequence<count>());
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

// Adds a property if the shape has it: `get` compiles for it.
template <typename Shape, typename Get>
auto add_property(py::class_<Shape>& shape, const char* name, Get get, int)
    -> decltype(get(std::declval<const Shape&>()), void()) {
  shape.def_property_readonly(name, [get](const Shape& self) { return get(self); });
}
template <typename Shape, typename Get>
void add_property(py::class_<Shape>&, const char*, Get, long) {}

template <typename Shape>
void bind_shape(py::module_& module, const char* name) {
  constexpr std::size_t least = count_members<Shape>() - kOptionalMembers<Shape>;
  py::class_<Shape> shape(module, name);
  shape.def(
      py::init([](const py::args& arguments) { return make_shape<Shape, least>(arguments); }));
#define CNN_ENGINE_PROPERTY(name) \
  add_property(                   \
      shape, #name, [](const auto& self) -> decltype(self.name()) { return self.name(); }, 0)
  CNN_ENGINE_PROPERTY(flops);
  CNN_ENGINE_PROPERTY(bytes);
  CNN_ENGINE_PROPERTY(out_h);
  CNN_ENGINE_PROPERTY(out_w);
  CNN_ENGINE_PROPERTY(packed_size);
  CNN_ENGINE_PROPERTY(weight_size);
  CNN_ENGINE_PROPERTY(output_size);
#undef CNN_ENGINE_PROPERTY
}

template <typename Enum>
void bind_enum(py::module_& module, const char* name) {
  py::enum_<Enum> bound(module, name);
  for (int i = 0; name_of(static_cast<Enum>(i)) != nullptr; ++i) {
    bound.value(name_of(static_cast<Enum>(i)), static_cast<Enum>(i));
  }
}

}  // namespace cnn_engine::bindings
