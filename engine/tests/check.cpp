#include "check.hpp"

#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

namespace storm::check {
namespace {

std::vector<std::pair<const char*, Body>>& tests() {
    static std::vector<std::pair<const char*, Body>> all;
    return all;
}

}  // namespace

Registration::Registration(const char* name, Body body) { tests().emplace_back(name, body); }

}  // namespace storm::check

int main(int argc, char** argv) {
    int passed = 0, failed = 0;
    for (const auto& [name, body] : storm::check::tests()) {
        bool chosen = argc < 2;
        for (int i = 1; i < argc; ++i) chosen |= std::string_view(name).find(argv[i]) != std::string_view::npos;
        if (!chosen) continue;
        try {
            body();
            ++passed;
        } catch (const std::exception& error) {
            std::printf("FAILED %s\n  %s\n", name, error.what());
            ++failed;
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
