// Speed of the erasure code on one core, beside ISA-L where it is installed: GB/s of data, medians of interleaved rounds.
//   make bench-coding      writes build/bench/coding.json
// Decoding loses as many chunks of data as there is parity, which is the most that it can.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "math/erasure.hpp"
#include "math/galois.hpp"

#if defined(STORM_ISAL)
#include <isa-l/erasure_code.h>
#endif

using namespace storm;

namespace {

// Time that this thread has had of a core, so that others on the machine count little.
double cpu_seconds() {
    std::timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Shape {
    std::size_t k, m, bytes;
};

struct Series {
    std::string name, work;
    std::function<void()> run;
    std::vector<double> gb_per_s{};
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// A block that lies in memory as a message does, with its parity and room for what is decoded.
struct Block {
    Shape shape;
    std::vector<std::byte> memory;
    std::vector<std::span<const std::byte>> data;
    std::vector<std::byte*> parity, restored;

    explicit Block(const Shape& of) : shape(of), memory((of.k + 2 * of.m) * of.bytes) {
        std::mt19937 random(1);
        for (std::byte& each : memory) each = static_cast<std::byte>(random());
        for (std::size_t c = 0; c < shape.k; ++c) data.emplace_back(memory.data() + c * shape.bytes, shape.bytes);
        for (std::size_t i = 0; i < shape.m; ++i) {
            parity.push_back(memory.data() + (shape.k + i) * shape.bytes);
            restored.push_back(memory.data() + (shape.k + shape.m + i) * shape.bytes);
        }
    }
    // Every k/m-th chunk is lost.
    [[nodiscard]] bool lost(std::size_t c) const { return c % (shape.k / shape.m) == 0; }
};

void encode(Block& block) { encode_parity(block.data, 0, block.parity, block.shape.bytes); }

void decode(Block& block) {
    static ErasureDecoder decoder;
    std::vector<ErasureDecoder::Chunk> chunks;
    std::vector<Parity> found;
    std::size_t at = 0;
    for (std::size_t c = 0; c < block.shape.k; ++c) {
        if (block.lost(c)) {
            chunks.push_back({.present = {}, .missing = {block.restored[at++], block.shape.bytes}, .arrived = false});
        } else {
            chunks.push_back({.present = block.data[c], .missing = {}, .arrived = true});
        }
    }
    for (std::size_t i = 0; i < block.shape.m; ++i) found.push_back({i, {block.parity[i], block.shape.bytes}});
    if (!decoder.decode(chunks, found, block.shape.bytes)) std::abort();
}

// One kernel by itself, without the matrices around it.
void kernel(Block& block, const GaloisVersion& version) {
    std::vector<const std::byte*> sources;
    std::vector<std::uint8_t> factors;
    for (const auto& chunk : block.data) sources.push_back(chunk.data());
    for (std::size_t i = 0; i < block.shape.m; ++i) {
        for (std::size_t c = 0; c < block.shape.k; ++c) factors.push_back(erasure_factor(i, c));
    }
    galois_sums(version, sources, block.parity, factors, block.shape.bytes, true);
}

#if defined(STORM_ISAL)

struct Isal {
    Block& block;
    std::vector<unsigned char> matrix, tables;
    std::vector<unsigned char*> data, parity, restored;

    explicit Isal(Block& of) : block(of) {
        const int k = static_cast<int>(of.shape.k), m = static_cast<int>(of.shape.m);
        matrix.resize(of.shape.k * (of.shape.k + of.shape.m));
        tables.resize(32 * of.shape.k * of.shape.m);
        gf_gen_cauchy1_matrix(matrix.data(), k + m, k);
        ec_init_tables(k, m, matrix.data() + k * k, tables.data());
        for (const auto& each : of.data) {
            data.push_back(const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(each.data())));
        }
        for (std::byte* each : of.parity) parity.push_back(reinterpret_cast<unsigned char*>(each));
        for (std::byte* each : of.restored) restored.push_back(reinterpret_cast<unsigned char*>(each));
    }
    void encode() {
        ec_encode_data(static_cast<int>(block.shape.bytes), static_cast<int>(block.shape.k),
                       static_cast<int>(block.shape.m), tables.data(), data.data(), parity.data());
    }
    // As ISA-L's own examples do it: the matrix of what is left is inverted, and its rows of what is lost are applied.
    void decode() {
        const std::size_t k = block.shape.k, m = block.shape.m;
        std::vector<unsigned char> left(k * k), inverse(k * k), rows(k * m), expanded(32 * k * m);
        std::vector<unsigned char*> sources;
        for (std::size_t c = 0; c < k; ++c) {
            if (!block.lost(c)) sources.push_back(data[c]);
        }
        std::size_t row = 0, out = 0;
        for (std::size_t c = 0; c < k; ++c) {
            if (!block.lost(c)) std::memcpy(left.data() + k * row++, matrix.data() + k * c, k);
        }
        for (std::size_t i = 0; row < k; ++i) {
            sources.push_back(parity[i]);
            std::memcpy(left.data() + k * row++, matrix.data() + k * (k + i), k);
        }
        if (gf_invert_matrix(left.data(), inverse.data(), static_cast<int>(k)) != 0) std::abort();
        for (std::size_t c = 0; c < k; ++c) {
            if (block.lost(c)) std::memcpy(rows.data() + k * out++, inverse.data() + k * c, k);
        }
        ec_init_tables(static_cast<int>(k), static_cast<int>(out), rows.data(), expanded.data());
        ec_encode_data(static_cast<int>(block.shape.bytes), static_cast<int>(k), static_cast<int>(out), expanded.data(),
                       sources.data(), restored.data());
    }
};

#endif

void check(Block& block, const std::string& who) {
    std::size_t at = 0;
    for (std::size_t c = 0; c < block.shape.k; ++c) {
        if (!block.lost(c)) continue;
        if (std::memcmp(block.restored[at++], block.data[c].data(), block.shape.bytes) != 0) {
            std::fprintf(stderr, "%s decoded nonsense\n", who.c_str());
            std::abort();
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    const int rounds = count > 2 ? std::stoi(arguments[2]) : 41;
    std::FILE* json = count > 1 ? std::fopen(arguments[1], "w") : stdout;
    if (json == nullptr || rounds < 1) {
        std::fprintf(stderr, "usage: %s [FILE [ROUNDS]]\n", arguments[0]);
        return 2;
    }
    std::fprintf(json, "{\n  \"benchmark\": \"coding\",\n  \"rounds\": %d,\n  \"kernel\": \"%s\",\n  \"series\": [",
                 rounds, galois_versions().front().name);
    const char* comma = "";
    for (const Shape& shape : {Shape{32, 8, 1440}, {128, 16, 1440}, {32, 8, 16384}, {128, 16, 16384}}) {
        Block block(shape);
        std::vector<Series> all;
        all.push_back({"storm", "encode", [&] { encode(block); }});
        all.push_back({"storm", "decode", [&] { decode(block); }});
#if defined(STORM_ISAL)
        Block other(shape);
        Isal isal(other);
        isal.encode();
        isal.decode();
        check(other, "ISA-L");
        all.push_back({"isal", "encode", [&] { isal.encode(); }});
        all.push_back({"isal", "decode", [&] { isal.decode(); }});
#endif
        for (const GaloisVersion& version : galois_versions()) {
            all.push_back({std::string("kernel-") + version.name, "encode", [&] { kernel(block, version); }});
        }
        encode(block);
        decode(block);
        check(block, "storm");
        const double data_bytes = static_cast<double>(shape.k * shape.bytes);
        for (int round = 0; round < rounds; ++round) {
            for (Series& each : all) {
                const bool slow = each.name == "kernel-plain";
                const int times = std::max(1, static_cast<int>((slow ? 1e6 : 8e6) / data_bytes));
                const double from = cpu_seconds();
                for (int i = 0; i < times; ++i) each.run();
                const double seconds = cpu_seconds() - from;
                each.gb_per_s.push_back(data_bytes * times / seconds / 1e9);
            }
        }
        for (const Series& each : all) {
            std::fprintf(json,
                         "%s\n    {\"k\": %zu, \"m\": %zu, \"chunk_bytes\": %zu, \"code\": \"%s\", \"work\": \"%s\", ",
                         comma, shape.k, shape.m, shape.bytes, each.name.c_str(), each.work.c_str());
            std::fprintf(json, "\"median_gb_per_s\": %.3f, \"worst_gb_per_s\": %.3f}", median(each.gb_per_s),
                         *std::min_element(each.gb_per_s.begin(), each.gb_per_s.end()));
            comma = ",";
            std::printf("(%3zu, %2zu) x %5zu  %-18s %s %7.2f GB/s\n", shape.k, shape.m, shape.bytes, each.name.c_str(),
                        each.work.c_str(), median(each.gb_per_s));
        }
    }
    std::fprintf(json, "\n  ]\n}\n");
    return std::fclose(json) == 0 ? 0 : 1;
}
