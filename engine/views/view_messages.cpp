#include "views/view_messages.hpp"

#include <algorithm>
#include <cstring>

namespace storm {
namespace {

class Writer {
public:
    explicit Writer(std::vector<std::byte>& out) : out_(out) {}

    template <class Number>
    void number(Number value) {
        const std::size_t at = out_.size();
        out_.resize(at + sizeof value);
        std::memcpy(out_.data() + at, &value, sizeof value);
    }
    // LEB128: seven bits a byte, lowest first; all bytes but the last have the eighth bit set.
    void incarnation(std::uint32_t value) {
        for (; value > 0x7f; value >>= 7) number(static_cast<std::uint8_t>(value | 0x80));
        number(static_cast<std::uint8_t>(value));
    }
    void member(Member who) {
        number(who.rank);
        incarnation(who.incarnation);
    }
    void members(const std::vector<Member>& all) {
        number(static_cast<std::uint8_t>(all.size()));
        for (const Member who : all) member(who);
    }
    void ballot(Ballot ballot) {
        number(ballot.round);
        number(ballot.rank);
        incarnation(ballot.incarnation);
    }
    // The number of bytes, then the bytes up to the last that is not zero, so that small jobs send little.
    void ranks(const Ranks& ranks) {
        std::uint8_t bytes = 0;
        for (const std::uint16_t rank : ranks) bytes = static_cast<std::uint8_t>(rank / 8 + 1);
        number(bytes);
        for (std::size_t at = 0; at < bytes; ++at)
            number(static_cast<std::uint8_t>(ranks.raw()[at / 8] >> (at % 8 * 8)));
    }
    void view(const View& view) {
        number(view.number);
        Ranks later, joined;
        for (const Member who : view.members) later.set(who.rank, who.incarnation != 0);
        for (const Member who : view.joined) joined.add(who.rank);
        ranks(view.ranks());
        ranks(later);
        for (const Member who : view.members) {
            if (who.incarnation != 0) incarnation(who.incarnation);
        }
        ranks(joined);
        ranks(view.blank);
        members(view.leaving);
        number(static_cast<std::uint8_t>(view.starts.size()));
        for (const Start& start : view.starts) {
            number(start.session);
            number(start.steps);
            number(start.base);
        }
    }

private:
    std::vector<std::byte>& out_;
};

// After an error it keeps reading zeros; `whole` says at the end whether there was an error.
class Reader {
public:
    Reader(std::span<const std::byte> bytes, std::uint16_t capacity) : rest_(bytes), capacity_(capacity) {}

    [[nodiscard]] bool whole() const { return good_ && rest_.empty(); }
    void require(bool holds) { good_ = good_ && holds; }

    template <class Number>
    [[nodiscard]] Number number() {
        Number value{};
        require(rest_.size() >= sizeof value);
        if (!good_) return value;
        std::memcpy(&value, rest_.data(), sizeof value);
        rest_ = rest_.subspan(sizeof value);
        return value;
    }
    [[nodiscard]] std::uint32_t incarnation() {
        std::uint64_t value = 0;
        for (unsigned bits = 0;; bits += 7) {
            const auto byte = number<std::uint8_t>();
            value |= std::uint64_t{byte & 0x7fU} << bits;
            if ((byte & 0x80) != 0 && bits < 28) continue;
            // The encoding is unique: no zero byte at the end, and at most 32 bits.
            require((byte & 0x80) == 0 && (byte != 0 || bits == 0) && value <= 0xffff'ffffU);
            return good_ ? static_cast<std::uint32_t>(value) : 0;
        }
    }
    [[nodiscard]] Member member() {
        Member who;
        who.rank = number<std::uint16_t>();
        who.incarnation = incarnation();
        require(who.rank < capacity_);
        return who;
    }
    [[nodiscard]] std::vector<Member> members(std::size_t most) {
        const std::size_t count = number<std::uint8_t>();
        require(count <= most);
        std::vector<Member> all;
        for (std::size_t i = 0; i < count && good_; ++i) all.push_back(member());
        return all;
    }
    [[nodiscard]] Ballot ballot() {
        Ballot ballot;
        ballot.round = number<std::uint32_t>();
        ballot.rank = number<std::uint16_t>();
        ballot.incarnation = incarnation();
        require(ballot.rank < capacity_);
        return ballot;
    }
    [[nodiscard]] Ranks ranks() {
        const std::size_t bytes = number<std::uint8_t>();
        require(bytes <= Ranks::bits / 8 && bytes <= rest_.size());
        Ranks ranks;
        if (!good_ || bytes == 0) return ranks;
        // The encoding is unique: the last byte is not zero.
        require(rest_[bytes - 1] != std::byte{0});
        for (std::size_t bit = 0; bit < 8 * bytes; ++bit) {
            if ((rest_[bit / 8] >> (bit % 8) & std::byte{1}) != std::byte{0}) ranks.add(bit);
        }
        require(ranks.next(capacity_) == Ranks::bits);
        rest_ = rest_.subspan(bytes);
        return ranks;
    }
    [[nodiscard]] std::vector<std::byte> remaining(std::size_t most) {
        require(rest_.size() <= most);
        if (!good_) return {};
        std::vector<std::byte> bytes(rest_.begin(), rest_.end());
        rest_ = {};
        return bytes;
    }
    [[nodiscard]] View view() {
        View view;
        view.number = number<std::uint32_t>();
        const Ranks all = ranks(), later = ranks();
        require(view.number != 0 && !all.empty() && all.contains(later));
        if (!good_) return view;
        for (const std::uint16_t rank : all) {
            Member who{rank, 0};
            if (later.has(rank)) {
                who.incarnation = incarnation();
                require(who.incarnation != 0);
            }
            view.members.push_back(who);
        }
        const Ranks joined = ranks();
        require(all.contains(joined));
        for (const Member who : view.members) {
            if (joined.has(who.rank)) view.joined.push_back(who);
        }
        view.blank = ranks();
        require(all.contains(view.blank) && view.blank.contains(joined));
        view.leaving = members(most_leaving);
        for (std::size_t i = 0; i < view.leaving.size(); ++i) {
            require(i == 0 || view.leaving[i - 1].rank < view.leaving[i].rank);
            require(!view.has(view.leaving[i]));
        }
        const std::size_t count = number<std::uint8_t>();
        require(count <= most_sessions);
        for (std::size_t i = 0; i < count && good_; ++i) {
            Start start;
            start.session = number<std::uint32_t>();
            start.steps = number<std::uint64_t>();
            start.base = number<std::uint32_t>();
            require(view.starts.empty() || view.starts.back().session < start.session);
            view.starts.push_back(start);
        }
        return view;
    }

private:
    std::span<const std::byte> rest_;
    std::uint16_t capacity_;
    bool good_ = true;
};

[[nodiscard]] bool has_ballot(ViewMessageKind kind) {
    return kind >= ViewMessageKind::prepare && kind <= ViewMessageKind::refusal;
}
[[nodiscard]] bool has_view(ViewMessageKind kind) {
    return kind == ViewMessageKind::value || kind == ViewMessageKind::propose || kind == ViewMessageKind::record;
}

}  // namespace

std::vector<std::byte> write_view_message(const ViewMessage& message) {
    std::vector<std::byte> bytes;
    bytes.reserve(64);
    Writer out(bytes);
    out.number(message.kind);
    out.incarnation(message.incarnation);
    out.number(message.number);
    if (has_ballot(message.kind)) out.ballot(message.ballot);
    if (has_view(message.kind)) out.view(message.view);
    switch (message.kind) {
        case ViewMessageKind::beat:
            out.number(message.flags);
            out.ranks(message.reachable);
            out.members(message.join_requests);
            break;
        case ViewMessageKind::promise:
            out.number(message.flags);
            out.ballot(message.accepted);
            out.number(static_cast<std::uint8_t>(message.positions.size()));
            for (const Position& each : message.positions) {
                out.number(each.session);
                out.number(each.steps);
                out.number(each.settled);
            }
            break;
        case ViewMessageKind::request: out.member(message.who); break;
        case ViewMessageKind::card:
            out.member(message.who);
            bytes.insert(bytes.end(), message.card.begin(), message.card.end());
            break;
        default: break;
    }
    return bytes;
}

std::optional<ViewMessage> parse_view_message(std::span<const std::byte> bytes, std::uint16_t capacity) {
    Reader in(bytes, capacity);
    ViewMessage message;
    message.kind = in.number<ViewMessageKind>();
    message.incarnation = in.incarnation();
    message.number = in.number<std::uint32_t>();
    in.require(message.kind >= ViewMessageKind::beat && message.kind <= ViewMessageKind::card);
    if (has_ballot(message.kind)) {
        message.ballot = in.ballot();
        in.require(static_cast<bool>(message.ballot));
    }
    if (has_view(message.kind)) message.view = in.view();
    switch (message.kind) {
        case ViewMessageKind::beat:
            message.flags = in.number<std::uint8_t>();
            in.require((message.flags & ~view_flags_all) == 0);
            message.reachable = in.ranks();
            message.join_requests = in.members(most_join_requests);
            break;
        case ViewMessageKind::promise: {
            message.flags = in.number<std::uint8_t>();
            in.require((message.flags & ~view_flags_all) == 0);
            message.accepted = in.ballot();
            const std::size_t count = in.number<std::uint8_t>();
            in.require(count <= most_sessions);
            for (std::size_t i = 0; i < count; ++i) {
                Position each;
                each.session = in.number<std::uint32_t>();
                each.steps = in.number<std::uint64_t>();
                each.settled = in.number<std::uint32_t>();
                message.positions.push_back(each);
            }
            break;
        }
        case ViewMessageKind::request: message.who = in.member(); break;
        case ViewMessageKind::card:
            message.who = in.member();
            message.card = in.remaining(most_card_bytes);
            break;
        default: break;
    }
    if (!in.whole()) return std::nullopt;
    return message;
}

}  // namespace storm
