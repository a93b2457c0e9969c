// View messages: writer, parser and quorum rule.
#include "check.hpp"
#include "views/view_messages.hpp"

using namespace storm;

namespace {

constexpr std::uint16_t capacity = 256;

// The largest possible view: all ranks were restarted, many leave.
View largest_view() {
    View view{.number = 0xffff'fffe};
    for (std::uint16_t rank = 0; rank < 256 - most_leaving; ++rank) view.members.push_back({rank, (1U << 21) - 1});
    view.joined = view.members;
    view.blank = view.ranks();
    for (std::uint16_t rank = 256 - most_leaving; rank < 256; ++rank) view.leaving.push_back({rank, 9});
    for (std::uint32_t session = 0; session < most_sessions; ++session) view.starts.push_back({session, ~0ULL, 7});
    return view;
}

std::vector<ViewMessage> one_of_each() {
    std::vector<ViewMessage> all;
    const Ballot ballot{3, 2, 1};
    ViewMessage beat{.kind = ViewMessageKind::beat, .incarnation = 5, .number = 6, .flags = view_flag_wants_join};
    for (std::size_t rank = 0; rank < 256; ++rank) beat.reachable.add(rank);
    for (std::uint16_t rank = 0; rank < most_join_requests; ++rank) beat.join_requests.push_back({rank, 1});
    all.push_back(beat);
    ViewMessage promise{
        .kind = ViewMessageKind::promise, .flags = view_flag_blank, .ballot = ballot, .accepted = {2, 1, 0}};
    for (std::uint32_t session = 0; session < most_sessions; ++session) promise.positions.push_back({session, 1, 2});
    all.push_back(promise);
    for (const ViewMessageKind kind : {ViewMessageKind::prepare, ViewMessageKind::accepted, ViewMessageKind::refusal})
        all.push_back({.kind = kind, .ballot = ballot});
    for (const ViewMessageKind kind : {ViewMessageKind::value, ViewMessageKind::propose})
        all.push_back({.kind = kind, .ballot = ballot, .view = largest_view()});
    all.push_back({.kind = ViewMessageKind::record, .view = largest_view()});
    all.push_back({.kind = ViewMessageKind::request, .who = {255, 3}});
    for (const std::uint32_t incarnation : {127U, 128U, 16'383U, 16'384U, 0x12345U, 0xffff'ffffU})
        all.push_back({.kind = ViewMessageKind::request, .incarnation = incarnation, .who = {255, incarnation}});
    all.push_back({.kind = ViewMessageKind::card, .who = {1, 2}, .card = std::vector<std::byte>(most_card_bytes)});
    return all;
}

}  // namespace

TEST(notes_come_back_as_they_were_and_fit_into_a_datagram) {
    for (const ViewMessage& note : one_of_each()) {
        const auto bytes = write_view_message(note);
        CHECK(bytes.size() <= most_view_message_bytes);
        CHECK(parse_view_message(bytes, capacity) == note);
    }
}

TEST(notes_that_are_cut_or_too_long_or_name_slots_that_are_not_there_are_refused) {
    for (const ViewMessage& note : one_of_each()) {
        auto bytes = write_view_message(note);
        if (note.kind != ViewMessageKind::card) {
            for (std::size_t size = 0; size < bytes.size(); ++size)
                CHECK(!parse_view_message(std::span(bytes).first(size), capacity));
        }
        const bool names_ranks = note.kind != ViewMessageKind::card && !note.ballot;
        CHECK(!names_ranks || !parse_view_message(bytes, 16));
        bytes.push_back(std::byte{1});
        CHECK(!parse_view_message(bytes, capacity));
    }
    CHECK(!parse_view_message({}, capacity));
}

TEST(bytes_of_strangers_never_throw_and_what_parses_comes_back_the_same) {
    std::uint64_t state = 1;
    for (const ViewMessage& note : one_of_each()) {
        for (int i = 0; i < 3000; ++i) {
            auto bytes = write_view_message(note);
            for (int flips = 0; flips < 3; ++flips) {
                state = state * 6364136223846793005ULL + 1442695040888963407ULL;
                bytes[(state >> 33) % bytes.size()] = static_cast<std::byte>(state >> 20);
            }
            if (const auto parsed = parse_view_message(bytes, capacity)) CHECK(write_view_message(*parsed) == bytes);
        }
    }
}

TEST(any_two_quorums_of_a_view_have_a_member_in_common) {
    for (std::uint16_t size = 1; size <= 7; ++size) {
        View view{.number = 1};
        for (std::uint16_t rank = 0; rank < size; ++rank) view.members.push_back({rank, 0});
        if (size % 3 == 1) view.joined = {view.members.front()};
        std::vector<Ranks> quorums;
        for (std::size_t bits = 0; bits < (1U << size); ++bits) {
            Ranks who, rest;
            for (std::size_t rank = 0; rank < size; ++rank) (bits >> rank & 1 ? who : rest).add(rank);
            // Of a set and the rest, exactly one is a quorum.
            CHECK(is_quorum(view, who) != is_quorum(view, rest));
            if (is_quorum(view, who)) quorums.push_back(who);
        }
        for (const Ranks& a : quorums) {
            for (const Ranks& b : quorums) CHECK(!(a & b).empty());
        }
    }
}
