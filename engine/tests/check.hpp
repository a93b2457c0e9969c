// The engine's own tests: TEST registers a sentence, CHECK fails it and says where. Link any number of such files with
// check.cpp; arguments select tests by a part of their name or file, and with a minus before it leave them out.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace storm::check {

using Body = void (*)();
struct Registration {
    Registration(const char* name, const char* file, Body body);
};

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
    if (a == b) return;
    std::ostringstream message;
    message << file << ':' << line << ": " << text << " (" << +a << " against " << +b << ')';
    throw std::runtime_error(message.str());
}

inline void that(bool holds, const char* text, const char* file, int line) {
    if (!holds) throw std::runtime_error(std::string(file) + ':' + std::to_string(line) + ": " + text);
}

}  // namespace storm::check

#define TEST(name)                                                                        \
    static void name();                                                                   \
    static const ::storm::check::Registration registration_##name(#name, __FILE__, name); \
    static void name()
#define CHECK(condition) ::storm::check::that((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQUAL(a, b) ::storm::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
