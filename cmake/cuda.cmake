# The CUDA executor: nvcc compiles each metal/*.metal into a fatbin, and a generated source embeds
# them. Sets VQKV_CUDA_SOURCES. Included where VQKV_CUDA is ON, or AUTO and nvcc was found.

# CMake's spelling: 90 is machine code and PTX, 90-real machine code, 90-virtual PTX.
set(VQKV_CUDA_ARCHITECTURES "80-real;86-real;89-real;90" CACHE STRING
  "GPU architectures that get kernels, spelt as in CMAKE_CUDA_ARCHITECTURES")
set(_targets)
foreach(_arch IN LISTS VQKV_CUDA_ARCHITECTURES)
  if(NOT _arch MATCHES "^([0-9]+[a-z]?)(-real|-virtual)?$")
    message(FATAL_ERROR "VQKV_CUDA_ARCHITECTURES: '${_arch}' is not of the form 90, 90-real or 90-virtual.")
  endif()
  set(_n ${CMAKE_MATCH_1})
  set(_kind "${CMAKE_MATCH_2}")
  # All GPUs of 9.0 run the code of 9.0a, which alone may have wgmma.
  string(REGEX REPLACE "^90$" "90a" _real ${_n})
  if(NOT _kind STREQUAL "-virtual")
    list(APPEND _targets "-gencode=arch=compute_${_real},code=sm_${_real}")
  endif()
  if(NOT _kind STREQUAL "-real")
    list(APPEND _targets "-gencode=arch=compute_${_n},code=compute_${_n}")
  endif()
endforeach()

# nvcc may be a wrapper script: it says itself where its toolkit is.
execute_process(COMMAND "${VQKV_NVCC}" --dryrun -x cu -E /dev/null
  OUTPUT_VARIABLE _dryrun ERROR_VARIABLE _dryrun COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "TOP=([^\n]*)" _ "${_dryrun}")
set(_toolkit "${CMAKE_MATCH_1}")
find_path(VQKV_CUDA_INCLUDE_DIR cuda_runtime.h REQUIRED
  HINTS "${_toolkit}" PATH_SUFFIXES include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include)
message(STATUS "CUDA kernels for ${VQKV_CUDA_ARCHITECTURES} by ${VQKV_NVCC}")

# -fmad=false: sums round as on the CPU; kernels say fma where they mean it.
set(_flags -std=c++17 -x cu -fmad=false --compress-mode=size -I "${CMAKE_CURRENT_SOURCE_DIR}/metal"
  -ccbin "${CMAKE_CXX_COMPILER}")
if(VQKV_WERROR)
  list(APPEND _flags -Werror all-warnings)
endif()
file(GLOB _sources CONFIGURE_DEPENDS metal/*.metal)
file(GLOB _headers CONFIGURE_DEPENDS metal/*.h metal/compat/*.h)
set(_fatbins)
set(_data)
set(_declarations)
set(_list)
foreach(_source IN LISTS _sources)
  get_filename_component(_name "${_source}" NAME_WE)
  set(_fatbin "${CMAKE_CURRENT_BINARY_DIR}/${_name}.fatbin")
  add_custom_command(OUTPUT "${_fatbin}"
    COMMAND "${VQKV_NVCC}" ${_flags} ${_targets} -fatbin -o "${_fatbin}" "${_source}"
    DEPENDS "${_source}" ${_headers}
    COMMENT "Compiling ${_name}.metal for CUDA" VERBATIM)
  list(APPEND _fatbins "${_fatbin}")
  string(APPEND _data "  .balign 16\n  .hidden vqkv_fatbin_${_name}\n"
    "  .globl vqkv_fatbin_${_name}\nvqkv_fatbin_${_name}:\n  .incbin \"${_fatbin}\"\n")
  string(APPEND _declarations "extern \"C\" const char vqkv_fatbin_${_name}[];\n")
  string(APPEND _list "vqkv_fatbin_${_name}, ")
endforeach()

set(_embedded "${CMAKE_CURRENT_BINARY_DIR}/fatbins.cpp")
file(CONFIGURE OUTPUT "${_embedded}" CONTENT [[
// Written by CMake.
#include "backend/fatbins.h"

asm(R"(
  .section .rodata
@_data@  .previous
)");

@_declarations@
namespace vqkv::backend {
const void* const fatbins[] = {@_list@nullptr};
}
]] @ONLY)
set_source_files_properties("${_embedded}" PROPERTIES OBJECT_DEPENDS "${_fatbins}")
set_source_files_properties(csrc/backend/cuda.cpp PROPERTIES
  INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/csrc/backend;${VQKV_CUDA_INCLUDE_DIR}")
set(VQKV_CUDA_SOURCES csrc/backend/cuda.cpp "${_embedded}")
