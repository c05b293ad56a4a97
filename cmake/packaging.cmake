# Debian packages: `cpack --config build/<preset>/CPackConfig.cmake` makes, one of each component,
#   libcuflash0      runtime        the library
#   libcuflash-dev   development    headers, CMake and pkg-config files
#   cuflash-tools    tools          cuflash-info and cuflash-bench, where they are built
#   python3-cuflash  python3        the Python package over ctypes, for any architecture
#   cuflash-doc      documentation  the site and the examples; only where `./dev docs` has built the site
# tests/package checks them. What only a package installs is EXCLUDE_FROM_ALL, out of `cmake --install`.
set(_runtime libcuflash${CUFLASH_SOVERSION})
set(_control ${PROJECT_BINARY_DIR}/deb-control)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME cuflash)
set(CPACK_PACKAGE_VENDOR cuflash)
set(CPACK_PACKAGE_CONTACT "The cuflash authors <cuflash@example.org>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL runtime development python3 documentation)
if(TARGET cuflash-info)
  list(APPEND CPACK_COMPONENTS_ALL tools)
  set(CPACK_CUFLASH_PROGRAMS ${PROJECT_BINARY_DIR}/bin/cuflash-info)
endif()
if(TARGET cuflash-bench)
  list(APPEND CPACK_CUFLASH_PROGRAMS ${PROJECT_BINARY_DIR}/bin/cuflash-bench)
endif()
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SOURCE cuflash)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CMAKE_STRIP ${PROJECT_SOURCE_DIR}/packaging/strip.sh)

# ---- relations and descriptions -----------------------------------------------------------------------
set(_library "${_runtime} (= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
file(STRINGS pyproject.toml _python_minimum REGEX "^requires-python")
string(REGEX REPLACE "^[^0-9]*([0-9.]+).*$" "\\1" _python_minimum "${_python_minimum}")

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${_runtime})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_MULTIARCH same)
if(CUFLASH_CUDA)
  # The driver's package has many names, and containers bring the driver from outside: no Depends.
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libcuda1 | libnvidia-compute-580")
endif()
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libcuflash-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_MULTIARCH same)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ${_library})
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS cuflash-doc)
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME cuflash-tools)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_PYTHON3_PACKAGE_NAME python3-cuflash)
set(CPACK_DEBIAN_PYTHON3_PACKAGE_SECTION python)
set(CPACK_DEBIAN_PYTHON3_PACKAGE_ARCHITECTURE all)
# python3 without :any, since the interpreter loads the library: both are of one architecture. NumPy
# is imported only by programs that bring its arrays; others bring those of another library.
set(CPACK_DEBIAN_PYTHON3_PACKAGE_DEPENDS "${_library}, python3 (>= ${_python_minimum})")
set(CPACK_DEBIAN_PYTHON3_PACKAGE_RECOMMENDS python3-numpy)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_NAME cuflash-doc)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_SECTION doc)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_DOCUMENTATION_PACKAGE_MULTIARCH foreign)

# CPack indents the lines itself, and takes the first as the synopsis if there is no summary.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")
function(_describe component what holds)
  set(CPACK_DEBIAN_${component}_DESCRIPTION "exact attention as a system library - ${what}
cuflash computes exact attention without storing the matrix of scores, on
NVIDIA GPUs and on the CPU. Its interface is one C header; it needs no
framework and no CUDA toolkit.

This package holds ${holds}" PARENT_SCOPE)
endfunction()
_describe(RUNTIME runtime "the shared library.")
_describe(DEVELOPMENT "development files"
  "the C and C++ headers, the CMake and pkg-config files.")
set(_bench)
if(TARGET cuflash-bench)
  set(_bench ",
and cuflash-bench, which measures how fast it is")
endif()
_describe(TOOLS tools
  "cuflash-info, which tells what the library holds, which
devices it finds and which kernel a call takes and why${_bench}.")
_describe(PYTHON3 "Python package"
  "the Python package: operations on arrays of NumPy, PyTorch,
CuPy, JAX and others without copies, PyTorch operators, and the C API.")
_describe(DOCUMENTATION documentation "the manual as HTML, and example programs.")

# ---- control files ------------------------------------------------------------------------------------
# Written here and not by CPack's own options, which make CPack 3.25 add maintainer scripts that call
# ldconfig. cpack-deb.cmake adds the symbols and what depends on the build.
file(WRITE ${_control}/shlibs
  "libcuflash ${CUFLASH_SOVERSION} ${_runtime} (>= ${PROJECT_VERSION})\n")
file(WRITE ${_control}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
  "${_control}/shlibs;${_control}/symbols;${_control}/triggers")
# Without them a root that imports the package leaves __pycache__ behind, which purging cannot know.
set(_python_scripts ${PROJECT_SOURCE_DIR}/packaging/debian/python3-cuflash)
set(CPACK_DEBIAN_PYTHON3_PACKAGE_CONTROL_EXTRA "${_python_scripts}/postinst;${_python_scripts}/prerm")

# ---- what only packages install -----------------------------------------------------------------------
configure_file(packaging/debian/changelog.in ${_control}/changelog.Debian @ONLY)
foreach(_component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER ${_component} _upper)
  set(_package ${CPACK_DEBIAN_${_upper}_PACKAGE_NAME})
  install(FILES ${_control}/changelog.Debian packaging/debian/copyright
    DESTINATION share/doc/${_package} COMPONENT ${_component} EXCLUDE_FROM_ALL)
  install(FILES CHANGELOG.md
    DESTINATION share/doc/${_package} RENAME changelog COMPONENT ${_component} EXCLUDE_FROM_ALL)
endforeach()

set(_python lib/python3/dist-packages)
configure_file(packaging/debian/python3-cuflash/METADATA.in ${_control}/METADATA @ONLY)
install(DIRECTORY bindings/python/cuflash DESTINATION ${_python}
  COMPONENT python3 EXCLUDE_FROM_ALL PATTERN __pycache__ EXCLUDE)
install(FILES ${_control}/METADATA packaging/debian/python3-cuflash/INSTALLER
  DESTINATION ${_python}/cuflash-${PROJECT_VERSION}.dist-info COMPONENT python3 EXCLUDE_FROM_ALL)

# Debian's place for a -doc package is the folder of the package that it documents.
set(_documents share/doc/${CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME})
set(CPACK_CUFLASH_SITE ${PROJECT_SOURCE_DIR}/build/docs/html)
install(DIRECTORY ${CPACK_CUFLASH_SITE} DESTINATION ${_documents}
  COMPONENT documentation EXCLUDE_FROM_ALL PATTERN .buildinfo EXCLUDE)
install(DIRECTORY examples DESTINATION ${_documents}
  COMPONENT documentation EXCLUDE_FROM_ALL PATTERN __pycache__ EXCLUDE)
install(FILES packaging/debian/cuflash-doc/doc-base DESTINATION share/doc-base
  RENAME cuflash-doc.cuflash COMPONENT documentation EXCLUDE_FROM_ALL)
install(FILES packaging/debian/cuflash-doc/lintian-overrides DESTINATION share/lintian/overrides
  RENAME cuflash-doc COMPONENT documentation EXCLUDE_FROM_ALL)

# ---- at cpack's time ----------------------------------------------------------------------------------
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/cpack-deb.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/cpack-files.cmake)
set(CPACK_CUFLASH_CONTROL ${_control})
set(CPACK_CUFLASH_SHLIBS "libcuflash ${CUFLASH_SOVERSION} ${_library}")  # for our own programs
set(CPACK_CUFLASH_LIBRARY ${PROJECT_BINARY_DIR}/lib/libcuflash.so.${PROJECT_VERSION})

include(CPack)
