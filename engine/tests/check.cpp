#include "check.hpp"

#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

namespace storm::check {
namespace {

struct Test {
    const char *name, *file;
    Body body;
};

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

}  // namespace

Registration::Registration(const char* name, const char* file, Body body) { tests().push_back({name, file, body}); }

}  // namespace storm::check

int main(int argc, char** argv) {
    int passed = 0, failed = 0;
    for (const auto& [name, file, body] : storm::check::tests()) {
        bool chosen = argc < 2;
        for (int i = 1; i < argc; ++i) {
            for (const std::string_view text : {name, file}) chosen |= text.find(argv[i]) != std::string_view::npos;
        }
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
