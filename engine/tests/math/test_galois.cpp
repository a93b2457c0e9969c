// The field of 256 elements: its laws, and every kernel against the plain one.
#include <random>
#include <vector>

#include "check.hpp"
#include "math/galois.hpp"

using namespace storm;

namespace {

std::vector<std::vector<std::byte>> random_buffers(std::size_t count, std::size_t bytes, std::mt19937& random) {
    std::vector<std::vector<std::byte>> made(count, std::vector<std::byte>(bytes));
    for (auto& buffer : made) {
        for (std::byte& each : buffer) each = static_cast<std::byte>(random());
    }
    return made;
}

}  // namespace

TEST(galois_products_obey_the_laws_of_a_field) {
    for (unsigned a = 0; a < 256; ++a) {
        const auto one = static_cast<std::uint8_t>(a);
        CHECK_EQUAL(galois_product(one, 1), one);
        CHECK_EQUAL(galois_product(one, 0), 0);
        if (a != 0) CHECK_EQUAL(galois_product(one, galois_inverse(one)), 1);
        for (unsigned b = 0; b < 256; ++b) {
            const auto other = static_cast<std::uint8_t>(b);
            CHECK_EQUAL(galois_product(one, other), galois_product(other, one));
            const auto third = static_cast<std::uint8_t>(a * 7 + b * 13 + 1);
            CHECK_EQUAL(galois_product(galois_product(one, other), third),
                        galois_product(one, galois_product(other, third)));
            CHECK_EQUAL(galois_product(one, static_cast<std::uint8_t>(other ^ third)),
                        galois_product(one, other) ^ galois_product(one, third));
        }
    }
    CHECK_EQUAL(galois_product(2, 0x80), 0x1d);  // x^8, modulo the polynomial
}

TEST(galois_kernels_agree_with_single_products_at_any_length_and_address) {
    std::mt19937 random(20261);
    for (const GaloisVersion& version : galois_versions()) {
        for (std::size_t turn = 0; turn < 120; ++turn) {
            const std::size_t bytes = turn < 70 ? turn : random() % 700;
            const std::size_t sources = random() % 20, outs = 1 + random() % 19, shift = random() % 5;
            const bool fresh = random() % 2 == 0;
            const auto from = random_buffers(sources, bytes + shift, random);
            auto to = random_buffers(outs, bytes + shift + 1, random);
            const auto before = to;
            std::vector<std::uint8_t> factors(sources * outs);
            for (auto& factor : factors) factor = static_cast<std::uint8_t>(random());
            std::vector<const std::byte*> in;
            std::vector<std::byte*> out;
            for (const auto& each : from) in.push_back(each.data() + shift);
            for (auto& each : to) out.push_back(each.data() + shift);
            galois_sums(version, in, out, factors, bytes, fresh);
            for (std::size_t o = 0; o < outs; ++o) {
                for (std::size_t i = 0; i < to[o].size(); ++i) {
                    auto expected = std::to_integer<std::uint8_t>(before[o][i]);
                    if (i >= shift && i < shift + bytes) {
                        if (fresh) expected = 0;
                        for (std::size_t s = 0; s < sources; ++s) {
                            expected ^=
                                galois_product(factors[o * sources + s], std::to_integer<std::uint8_t>(from[s][i]));
                        }
                    }
                    CHECK_EQUAL(std::to_integer<std::uint8_t>(to[o][i]), expected);
                }
            }
        }
    }
}

TEST(galois_kernels_multiply_every_byte_by_every_factor) {
    std::vector<std::byte> bytes(256);
    for (unsigned i = 0; i < 256; ++i) bytes[i] = static_cast<std::byte>(i);
    const std::byte* source = bytes.data();
    for (const GaloisVersion& version : galois_versions()) {
        for (unsigned factor = 0; factor < 256; ++factor) {
            std::vector<std::byte> product(256);
            std::byte* out = product.data();
            const auto by = static_cast<std::uint8_t>(factor);
            galois_sums(version, std::span(&source, 1), std::span(&out, 1), std::span(&by, 1), 256, true);
            for (unsigned i = 0; i < 256; ++i) {
                CHECK_EQUAL(std::to_integer<std::uint8_t>(product[i]),
                            galois_product(by, static_cast<std::uint8_t>(i)));
            }
        }
    }
}
