// Log lines: to the callback, or to CUFLASH_LOG_FILE (stderr) up to CUFLASH_LOG_LEVEL.
#pragma once

#include "cuflash.h"

namespace cuflash {

bool log_enabled(int32_t level);
[[gnu::format(printf, 2, 3)]] void log_line(int32_t level, const char* format, ...);
void set_log_callback(cuflash_log_fn callback, void* user, int32_t level);

}  // namespace cuflash
