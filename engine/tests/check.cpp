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
        bool asked = false, chosen = false, left_out = false;
        for (int i = 1; i < argc; ++i) {
            std::string_view part = argv[i];
            const bool leave_out = part.starts_with('-');
            if (leave_out) part.remove_prefix(1);
            asked |= !leave_out;
            for (const std::string_view text : {name, file}) {
                (leave_out ? left_out : chosen) |= text.find(part) != std::string_view::npos;
            }
        }
        if (left_out || (asked && !chosen)) continue;
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
