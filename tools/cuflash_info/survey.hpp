// What the library holds and what each device takes from it, as one JSON document and as text.
#pragma once

#include <string>
#include <vector>

#include "question.hpp"

namespace cuflash_info {

// Version and build: how every document begins.
Json about_library();

// The kernels, and which of them each target takes.
Json survey(const std::vector<Target>& targets);
std::string text_of_survey(const Json& document);

Json explanation(const Target& target, const Question& question);
std::string text_of_explanation(const Json& document);

std::string text_of_self_test(const Json& document);

}  // namespace cuflash_info
