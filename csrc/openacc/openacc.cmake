# The module _openacc: loop nests with OpenACC directives, by nvc++ where there is one, else by GCC. It is linked by
# the compiler of the directives, which makes the code for a GPU then; what that compiler says of every loop goes into
# the module (compile.cmake, embed.cmake).
string(TOLOWER "${CNN_ENGINE_OPENACC}" openacc)
if(openacc MATCHES "^(off|0)$")
  return()
elseif(NOT openacc MATCHES "^(auto|on|1)$")
  message(FATAL_ERROR "CNN_ENGINE_OPENACC: expected auto, on or off, found '${CNN_ENGINE_OPENACC}'")
endif()

set(acc "${CMAKE_CURRENT_BINARY_DIR}/openacc")
file(MAKE_DIRECTORY "${acc}" "${CNN_ENGINE_OUTPUT}")
file(WRITE "${acc}/check.cpp" "#include <acc_prof.h>
#include <openacc.h>
#ifndef _OPENACC
#error no OpenACC
#endif
int count(int* x) {
#pragma acc parallel loop copy(x[0 : 10])
  for (int i = 0; i < 10; ++i) x[i] = i;
  return acc_get_num_devices(acc_device_nvidia);
}
")
function(openacc_accepts result message)  # whether a compiler with flags makes a shared library of the check
  execute_process(COMMAND ${ARGN} -shared -fPIC check.cpp -o check.so WORKING_DIRECTORY "${acc}"
                  RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX MATCH "[^\n]*(error|fatal)[^\n]*" output "${output}")
  string(REGEX REPLACE "[\"\\\\]" "'" output "${output}")
  string(REGEX REPLACE "(could not find [^ ]+) in .*" "\\1" output "${output}")  # GCC's whole search path
  set(${message} "${output}" PARENT_SCOPE)
  if(code STREQUAL "0")
    set(${result} ON PARENT_SCOPE)
  else()
    set(${result} OFF PARENT_SCOPE)
  endif()
endfunction()

find_program(nvcpp NAMES nvc++ NO_CACHE)
set(acc_offload "")
set(acc_why_not "")
if(nvcpp)
  set(acc_compiler "${nvcpp}")
  set(acc_kind nvc)
  set(acc_target -acc=gpu,host)
  openacc_accepts(acc_found acc_message ${acc_compiler} ${acc_target})
  set(acc_offload "nvidia")
  execute_process(COMMAND ${nvcpp} --version OUTPUT_VARIABLE acc_version)
  string(REGEX MATCH "nvc\\+\\+ [0-9.-]+" acc_version "${acc_version}")
else()
  set(acc_compiler "${CMAKE_CXX_COMPILER}")
  set(acc_kind gcc)
  set(acc_version "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  set(acc_target -fopenacc -foffload=disable)
  openacc_accepts(acc_found acc_message ${acc_compiler} ${acc_target})
  # PTX for compute capability 8.0, the least that this project knows; a compiler that does not know it, its default.
  foreach(options IN ITEMS "-foffload-options=nvptx-none=-misa=sm_80" "")
    if(acc_found AND NOT acc_offload)
      set(offload -fopenacc -foffload=nvptx-none ${options} "-foffload-options=-lm")
      openacc_accepts(acc_offloads acc_message ${acc_compiler} ${offload})
      if(acc_offloads)
        set(acc_target ${offload})
        set(acc_offload "nvptx")
      elseif(NOT acc_why_not)
        set(acc_why_not "${acc_message}")
      endif()
    endif()
  endforeach()
  if(acc_offload)
    set(acc_why_not "")
  endif()
endif()
if(NOT acc_found)
  if(openacc STREQUAL "auto")
    message(STATUS "No compiler for OpenACC found: building without it")
    return()
  endif()
  message(FATAL_ERROR "CNN_ENGINE_OPENACC is on, but neither nvc++ nor ${CMAKE_CXX_COMPILER} -fopenacc works: "
                      "${acc_message}")
endif()

set(acc_clauses "")
if(CNN_ENGINE_OPENACC_SHAPE)
  if(NOT CNN_ENGINE_OPENACC_SHAPE MATCHES "^([0-9]+):([0-9]+):([0-9]+)$")
    message(FATAL_ERROR "CNN_ENGINE_OPENACC_SHAPE: expected gangs:workers:vector, such as 0:4:32 (0: left to the "
                        "compiler), found '${CNN_ENGINE_OPENACC_SHAPE}'")
  endif()
  set(sizes ${CMAKE_MATCH_1} ${CMAKE_MATCH_2} ${CMAKE_MATCH_3})
  set(names num_gangs num_workers vector_length)
  foreach(name size IN ZIP_LISTS names sizes)
    if(NOT size EQUAL 0)
      string(APPEND acc_clauses " ${name}(${size})")
    endif()
  endforeach()
endif()
if(acc_kind STREQUAL "gcc")
  set(acc_flags ${acc_target} -fno-math-errno -fno-trapping-math -Wall -Wextra
      -Wno-unused-parameter)  # GCC 12 does not see that a directive uses one
  set(acc_says -fopt-info-omp-all)
else()
  set(acc_flags ${acc_target} -Minfo=accel)
  set(acc_says "")
endif()
list(APPEND acc_flags -std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden)
if(acc_clauses)
  list(APPEND acc_flags "-DCNN_ENGINE_ACC_SHAPE=${acc_clauses}")
endif()
message(STATUS "OpenACC: ${acc_version}, ${acc_target}")

# ---- the loop nests, compiled by compile.cmake, which keeps what the compiler says ----
set(acc_sources conv2d conv2d_if conv2d_pad data elementwise linear max_pool2d pad2d profile softmax)
file(GLOB acc_headers CONFIGURE_DEPENDS csrc/openacc/*.h csrc/ops/*.h csrc/runtime/shape.h)
set(acc_settings "${acc}/settings.cmake")
file(CONFIGURE OUTPUT "${acc_settings}" @ONLY CONTENT [=[
set(compiler "@acc_compiler@")
set(kind "@acc_kind@")
set(flags "@acc_flags@")
set(says "@acc_says@")
set(target "@acc_target@")
set(offload "@acc_offload@")
]=])
set(acc_objects "")
set(acc_mappings "")
foreach(name IN LISTS acc_sources)
  set(object "${acc}/${name}.o")
  add_custom_command(OUTPUT "${object}" "${object}.mapping"
    COMMAND "${CMAKE_COMMAND}" -DSETTINGS=${acc_settings} -DSOURCE=openacc/${name}.cpp -DOBJECT=${object}
            -P "${CMAKE_CURRENT_SOURCE_DIR}/csrc/openacc/compile.cmake"
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/csrc"
    DEPENDS csrc/openacc/${name}.cpp csrc/openacc/compile.cmake ${acc_headers} "${acc_settings}"
    COMMENT "OpenACC: ${name}" VERBATIM)
  list(APPEND acc_objects "${object}")
  list(APPEND acc_mappings "${object}.mapping")
endforeach()
add_custom_command(OUTPUT "${acc}/listing.cpp"
  COMMAND "${CMAKE_COMMAND}" -DSETTINGS=${acc_settings} -DFOLDER=${acc} "-DNAMES=${acc_sources}"
          -P "${CMAKE_CURRENT_SOURCE_DIR}/csrc/openacc/embed.cmake"
  WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/csrc"
  DEPENDS ${acc_objects} ${acc_mappings} csrc/openacc/embed.cmake
  COMMENT "OpenACC: what the compiler said" VERBATIM)

# ---- the bindings, by the compiler of the other modules, whose types they share ----
add_library(openacc_bindings OBJECT csrc/bindings/openacc.cpp "${acc}/listing.cpp")
target_link_libraries(openacc_bindings PRIVATE cnn_engine_options pybind11::module)
target_compile_definitions(openacc_bindings PRIVATE
  CNN_ENGINE_OPENACC_COMPILER="${acc_version}"
  CNN_ENGINE_OPENACC_OFFLOAD="${acc_offload}"
  CNN_ENGINE_OPENACC_WHY_NOT_OFFLOAD="${acc_why_not}"
  CNN_ENGINE_OPENACC_SHAPE="${CNN_ENGINE_OPENACC_SHAPE}")

# $ORIGIN, and as RPATH, not RUNPATH: a libgomp beside the module is found, and by it its plugin for the GPU.
set(acc_module "${CNN_ENGINE_OUTPUT}/_openacc.${Python_SOABI}.so")
add_custom_command(OUTPUT "${acc_module}"
  COMMAND "${acc_compiler}" ${acc_target} -O3 -shared -fPIC -Wl,--disable-new-dtags "-Wl,-rpath,$ORIGIN"
          $<TARGET_OBJECTS:openacc_bindings> ${acc_objects} -o "${acc_module}"
  DEPENDS openacc_bindings $<TARGET_OBJECTS:openacc_bindings> ${acc_objects}
  COMMENT "Linking ${acc_module}" VERBATIM COMMAND_EXPAND_LISTS)
add_custom_target(_openacc ALL DEPENDS "${acc_module}")
