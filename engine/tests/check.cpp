#include "check.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
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

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// A test that fails while engines still use its memory may crash before anybody has told its name. Sanitizers have
// handlers of their own, which tell more.
const char* volatile running = "";

void name_the_crash(int number) {
    for (const char* text : {"CRASHED in ", static_cast<const char*>(running), "\n"})
        (void)!write(STDERR_FILENO, text, std::strlen(text));
    std::signal(number, SIG_DFL);
    std::raise(number);
}
#endif

}  // namespace

Registration::Registration(const char* name, const char* file, Body body) { tests().push_back({name, file, body}); }

}  // namespace storm::check

int main(int argc, char** argv) {
    int passed = 0, failed = 0;
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what was told counts, even if a later test crashes
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    for (const int number : {SIGSEGV, SIGABRT, SIGBUS}) std::signal(number, storm::check::name_the_crash);
#endif
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
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        storm::check::running = name;
#endif
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
