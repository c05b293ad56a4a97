# The library inside the Python package. A wheel holds no links: one file, of the name that the
# bindings load.
set_target_properties(cuflash PROPERTIES VERSION ${CUFLASH_SOVERSION})
install(TARGETS cuflash LIBRARY DESTINATION lib COMPONENT python NAMELINK_SKIP)
