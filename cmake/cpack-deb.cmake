# Run by cpack: the date of the packages, which of them can be made, and what the built binaries depend
# on and offer.
if(NOT CPACK_GENERATOR STREQUAL "DEB")
  return()
endif()
set(_package ${CPACK_DEBIAN_RUNTIME_PACKAGE_NAME})
set(_work ${CPACK_CUFLASH_CONTROL}/work)
file(REMOVE_RECURSE ${_work})
file(WRITE ${_work}/debian/control "Source: cuflash\n\nPackage: ${_package}\nArchitecture: any\n")

# Every file in the packages has the changelog's date: the same tree gives the same bytes at any time.
if(NOT DEFINED ENV{SOURCE_DATE_EPOCH})
  execute_process(
    COMMAND dpkg-parsechangelog -l${CPACK_CUFLASH_CONTROL}/changelog.Debian -STimestamp
    OUTPUT_VARIABLE _date OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(ENV{SOURCE_DATE_EPOCH} ${_date})
endif()

if(NOT EXISTS ${CPACK_CUFLASH_SITE}/index.html)
  message(STATUS "No ${CPACK_DEBIAN_DOCUMENTATION_PACKAGE_NAME}: there is no site in "
    "${CPACK_CUFLASH_SITE} (./dev docs builds it)")
  list(REMOVE_ITEM CPACK_COMPONENTS_ALL documentation)
endif()

# The packages that built binaries need, into `result`.
function(_shlibdeps binaries result)
  cmake_path(GET CPACK_CUFLASH_LIBRARY PARENT_PATH folder)
  list(TRANSFORM binaries PREPEND -e)
  execute_process(COMMAND dpkg-shlibdeps -O -l${folder} ${binaries}
    WORKING_DIRECTORY ${_work} OUTPUT_VARIABLE depends COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "^.*shlibs:Depends=([^\n]*).*$" "\\1" depends "${depends}")
  set(${result} "${depends}" PARENT_SCOPE)
endfunction()
file(WRITE ${_work}/debian/shlibs.local "${CPACK_CUFLASH_SHLIBS}\n")
_shlibdeps(${CPACK_CUFLASH_LIBRARY} CPACK_DEBIAN_RUNTIME_PACKAGE_DEPENDS)
if(CPACK_CUFLASH_PROGRAMS)
  _shlibdeps("${CPACK_CUFLASH_PROGRAMS}" CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS)
endif()

execute_process(
  COMMAND dpkg-gensymbols -q -O -p${_package} -v${CPACK_PACKAGE_VERSION} -P${_work}
    -e${CPACK_CUFLASH_LIBRARY}
  WORKING_DIRECTORY ${_work} OUTPUT_VARIABLE _symbols COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "#MINVER#\n" "#MINVER#\n* Build-Depends-Package: libcuflash-dev\n" _symbols
  "${_symbols}")
file(WRITE ${CPACK_CUFLASH_CONTROL}/symbols "${_symbols}")
