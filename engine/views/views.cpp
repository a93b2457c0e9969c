#include "views/views.hpp"

#include <algorithm>
#include <stdexcept>

namespace storm {
namespace {

constexpr Nanos first_back_off = second, longest_back_off = 30 * second, long_inside = 60 * second;
// An ask is forgotten after so long; whoever still wants in asks again.
constexpr Nanos ask_life = 15 * second;
// Processes outside the view hear from us every so many beats.
constexpr unsigned outsider_beats = 5;

}  // namespace

Views::Views(const ViewsConfig& config, Nanos now)
    : self_(config.self),
      capacity_(config.capacity),
      silence_(config.silence),
      period_(config.silence / 10),
      random_(config.seed * 0x9e37'79b9'7f4a'7c15ULL + config.self.rank),
      net_(config.self.rank, config.capacity, config.silence),
      slots_(config.capacity),
      last_tick_(now),
      knock_at_(now),
      back_off_(first_back_off),
      inside_since_(now) {
    if (config.capacity > Ranks::bits) throw std::invalid_argument("views have at most 256 slots");
    if (config.self.rank >= config.capacity) throw std::invalid_argument("the own rank lies beyond the slots");
    slots_[self_.rank].incarnation = self_.incarnation;
    if (config.members.empty()) return;
    latest_.number = config.number;
    latest_.members = config.members;
    std::sort(latest_.members.begin(), latest_.members.end());
    for (const Member who : latest_.members) {
        if (who.rank >= capacity_) throw std::invalid_argument("a member's rank lies beyond the slots");
        if (who.rank != self_.rank) slots_[who.rank] = {.incarnation = who.incarnation};
    }
    show();
}

void Views::watch(Nanos now) {
    if (watching_) return;
    watching_ = dirty_ = true;
    last_tick_ = beat_at_ = now;
    for (const Member who : latest_.members) net_.trust(who.rank, now);
    if (lacks_cards()) cards_at_ = now;
}

bool Views::watching() const { return watching_; }

void Views::hear(std::uint16_t from, Nanos now) {
    if (from >= capacity_) return;
    net_.hear(from, now);
    if (!refused_.has(from)) return;
    refused_.remove(from);
    dirty_ = true;
}

void Views::refused(std::uint16_t from, Nanos now) {
    if (from >= capacity_ || from == self_.rank) return;
    refused_.add(from);
    last_tick_ = std::max(last_tick_, now);
    dirty_ = true;
}

void Views::gone(std::uint16_t from, Nanos now) {
    if (from >= capacity_ || from == self_.rank) return;
    net_.gone(from);
    slots_[from].flags = 0;
    last_tick_ = std::max(last_tick_, now);
    dirty_ = true;
}

void Views::blocked(std::uint16_t from, Nanos now) {
    if (from < capacity_) net_.blocked(from, now);
}

void Views::readmitted(Member who, Nanos now) {
    if (who.rank < capacity_ && who.rank != self_.rank) occupy(who, now);
}

// A process has the slot, if it is not older than the one that we know there.
void Views::occupy(Member who, Nanos now) {
    Slot& slot = slots_[who.rank];
    if (who.incarnation < slot.incarnation) return;
    if (who.incarnation > slot.incarnation) {
        slot = {.incarnation = who.incarnation};
        net_.reset(who.rank);
        refused_.remove(who.rank);
        // The promises of a proposal are those of the processes that it began with.
        if (proposal_ && voters().has(who.rank)) abandon(now);
        dirty_ = true;
    }
    if (latest_.has(who) && !net_.heard_at(who.rank)) net_.trust(who.rank, now);
}

void Views::receive(std::uint16_t from, std::span<const std::byte> body, Nanos now) {
    if (from >= capacity_ || from == self_.rank || body.size() > most_note_bytes) return;
    const std::optional<NoteBody> note = parse_note(body, capacity_);
    if (!note || note->incarnation < slots_[from].incarnation) return;
    occupy({from, note->incarnation}, now);
    if (net_.left().has(from)) return;
    watch(now);
    hear(from, now);
    if (note->number > slots_[from].number) {
        slots_[from].number = note->number;
        dirty_ = true;  // it may have knocked before, and know this view only now
    }
    catch_up(from, *note, now);
    switch (note->kind) {
        case NoteKind::beat: on_beat(from, *note, now); break;
        case NoteKind::prepare: on_prepare(from, *note, now); break;
        case NoteKind::propose: on_propose(from, *note, now); break;
        case NoteKind::promise:
            if (!proposal_ || note->ballot != proposal_->ballot) break;
            proposal_->on_promise(from, note->accepted, note->positions, (note->flags & note_blank) == 0);
            try_vote(now);
            break;
        case NoteKind::value:
            if (!proposal_ || note->number != latest_.number) break;
            proposal_->on_value(note->ballot, note->view);
            try_vote(now);
            break;
        case NoteKind::accepted:
            if (!proposal_ || !proposal_->voting || note->ballot != proposal_->ballot) break;
            proposal_->accepted.add(from);
            try_decide(now);
            break;
        case NoteKind::refusal:
            round_ = std::max(round_, note->ballot.round);
            if (proposal_ && note->number == latest_.number && note->ballot > proposal_->ballot) abandon(now);
            break;
        case NoteKind::record: on_record(note->view, now); break;
        case NoteKind::request:
            if (const Card* found = find_card(note->who)) {
                NoteBody reply = make(NoteKind::card);
                reply.who = found->who;
                reply.card = found->bytes;
                send(from, reply);
            }
            break;
        case NoteKind::card: on_card(*note); break;
    }
}

void Views::on_record(const View& view, Nanos now) {
    if (view.number <= latest_.number) return;
    // Who has accepted a view in another's place belongs to that lineage, and must not be won over by one that it left.
    if (!takes_part() && answers_.accepted && view.number < answers_.value.number) return;
    install(view, now);
}

// Whoever knows a later view tells the other. The latest is enough: nobody needs those between.
void Views::catch_up(std::uint16_t from, const NoteBody& note, Nanos now) {
    Slot& slot = slots_[from];
    const Nanos gap = silence_ / 40;
    if (note.number < latest_.number && now >= slot.told_at + gap) {
        slot.told_at = now;
        NoteBody record = make(NoteKind::record);
        record.view = latest_;
        send(from, record);
    } else if (note.number > latest_.number && note.kind != NoteKind::record && now >= slot.poked_at + gap) {
        slot.poked_at = now;
        NoteBody poke = make(NoteKind::beat);
        poke.hears = net_.hears();
        send(from, poke);
    }
}

void Views::on_beat(std::uint16_t from, const NoteBody& note, Nanos now) {
    net_.report(from, note.hears, now);
    if (slots_[from].flags != note.flags) {
        // Whether a peer is frozen is news to people only.
        if (((slots_[from].flags ^ note.flags) & ~note_frozen) != 0) dirty_ = true;
        slots_[from].flags = note.flags;
    }
    for (const Member who : note.asks) {
        put_ask(who, now, now + silence_, false);
        if (who == self_ || who.incarnation == 0 || find_card(who) != nullptr || now < slots_[from].poked_at + period_)
            continue;
        slots_[from].poked_at = now;
        NoteBody request = make(NoteKind::request);
        request.who = who;
        send(from, request);
    }
}

void Views::on_card(const NoteBody& note) {
    // Only cards that somebody needs are kept: strangers cannot fill the memory.
    const bool needed = latest_.has(note.who) ||
                        std::any_of(asks_.begin(), asks_.end(), [&](const Ask& ask) { return ask.who == note.who; });
    if (!needed || find_card(note.who) != nullptr || note.card.empty()) return;
    cards_.push_back({note.who, note.card});
    dirty_ = true;
    show();
}

void Views::tick(Nanos now) {
    if (!watching_) return;
    if (now - last_tick_ > silence_ / 2) {
        net_.slept(now);
        wanted_since_ = never;
        active_at_ = now;
        if (proposal_) abandon(now);
    }
    last_tick_ = std::max(last_tick_, now);
    net_.refresh(now);
    if (net_.take_changed()) {
        dirty_ = true;
        beat_at_ = std::min(beat_at_, std::max(now, beaten_at_ + period_ / 4));
    }
    if (std::erase_if(asks_, [&](const Ask& ask) { return ask.until <= now; }) > 0) dirty_ = true;
    if (now >= beat_at_) beat(now);
    if (now >= cards_at_) fetch_cards(now);
    if (proposal_) drive(now);
    if (dirty_ || now >= consider_at_) consider(now);
}

Nanos Views::next_timer() const {
    if (!watching_) return never;
    if (dirty_ || net_.changed()) return last_tick_;
    Nanos next = std::min({beat_at_, consider_at_, cards_at_, net_.next_silence()});
    if (proposal_) next = std::min(next, proposal_->resend_at);
    return next;
}

std::optional<Note> Views::take_note() {
    if (out_.empty()) return std::nullopt;
    Note note = std::move(out_.front());
    out_.pop_front();
    return note;
}

void Views::beat(Nanos now) {
    beaten_at_ = now;
    beat_at_ = now + period_;
    const bool outsiders_too = beats_++ % outsider_beats == 0 || !takes_part();
    NoteBody note = make(NoteKind::beat);
    note.hears = net_.hears();
    note.flags = static_cast<std::uint8_t>((frozen() ? note_frozen : 0) | (knocks(now) ? note_knocks : 0) |
                                           (wants_out_ ? note_leaves : 0));
    for (const Ask& ask : asks_) {
        if (ask.own && note.asks.size() < most_asks) note.asks.push_back(ask.who);
    }
    const std::vector<std::byte> body = write_note(note);
    const Ranks listed = voters();
    for (std::uint16_t rank = 0; rank < capacity_; ++rank) {
        if (rank == self_.rank || net_.left().has(rank)) continue;
        // The others hear of us too, wherever there is somebody: they may have been cut off for long.
        if (outsiders_too || listed.has(rank)) out_.push_back({rank, body});
    }
}

void Views::enroll(const Position& position) {
    withdraw(position.session);
    if (sessions_.size() >= most_sessions) throw std::length_error("a process has at most 24 sessions at a time");
    const bool begun = latest_.start(position.session) != nullptr;
    sessions_.push_back({.position = position,
                         .place = begun ? position.settled : std::max(position.settled, latest_.number),
                         .blank = begun && position.settled == 0});
}

bool Views::advance(const Position& position) {
    const auto found = std::find_if(sessions_.begin(), sessions_.end(),
                                    [&](const Session& each) { return each.position.session == position.session; });
    if (found == sessions_.end()) return false;
    const Start* start = latest_.start(position.session);
    // A view from which all go on is in place, also where this process hears so only with the next one.
    const bool settles = takes_part() && (position.settled == latest_.number ||
                                          (start != nullptr && position.settled == start->base &&
                                           position.settled > found->place && !latest_.takes_in(self_)));
    const std::uint32_t place = settles ? position.settled : found->place;
    if (position.steps != found->position.steps) {
        if (frozen() || !takes_part()) return false;
        if (place < latest_.number || latest_.lets_go(self_)) {
            if (position.steps > (start == nullptr ? found->position.steps : start->steps)) return false;
        }
        found->position.steps = position.steps;
    }
    found->place = place;
    if (settles) {
        found->position.settled = position.settled;
        found->blank = blank_ = false;
    }
    return true;
}

void Views::withdraw(std::uint32_t session) {
    std::erase_if(sessions_, [&](const Session& each) { return each.position.session == session; });
}

bool Views::blank(std::uint32_t session) const {
    return std::any_of(sessions_.begin(), sessions_.end(),
                       [&](const Session& each) { return each.position.session == session && each.blank; });
}

void Views::ask_in(Member who, std::span<const std::byte> card, Nanos now) {
    if (who.rank >= capacity_) throw std::invalid_argument("the rank that asks in lies beyond the slots");
    if (card.size() > most_card_bytes) throw std::invalid_argument("a card has at most 400 bytes");
    if (find_card(who) == nullptr) cards_.push_back({who, {card.begin(), card.end()}});
    show();
    if (who == self_) {
        wants_out_ = false;
        dirty_ = true;
        return;
    }
    put_ask(who, now, now + ask_life, true);
    watch(now);
    beat_at_ = now;
}

void Views::ask_out(Nanos now) {
    wants_out_ = dirty_ = true;
    watch(now);
    beat_at_ = now;
}

void Views::ask_anew(Nanos now) {
    wants_anew_ = dirty_ = true;
    watch(now);
    beat_at_ = now;
}

void Views::put_ask(Member who, Nanos now, Nanos until, bool own) {
    if (who.rank == self_.rank || latest_.has(who) || who.incarnation < slots_[who.rank].incarnation) return;
    if (who.incarnation > slots_[who.rank].incarnation) occupy(who, now);
    for (Ask& ask : asks_) {
        if (ask.who.rank != who.rank) continue;
        if (ask.who.incarnation > who.incarnation) return;
        if (ask.who != who) dirty_ = true;
        ask = {who, std::max(until, ask.who == who ? ask.until : 0), own || (ask.who == who && ask.own)};
        return;
    }
    if (asks_.size() >= most_asks) return;
    asks_.push_back({who, until, own});
    dirty_ = true;
}

// A decided view takes effect. It may come from its proposer, or much later from anybody.
void Views::install(const View& view, Nanos now) {
    const bool was_inside = takes_part();
    latest_ = view;
    answers_ = {};
    proposal_.reset();
    failures_ = 0;
    patience_ = 0;
    wanted_since_ = consider_at_ = never;
    wants_anew_ = false;
    for (const Member who : view.members) {
        if (who.rank == self_.rank) continue;
        occupy(who, now);
        if (view.takes_in(who)) net_.trust(who.rank, now);
    }
    std::erase_if(asks_, [&](const Ask& ask) {
        const Member* present = view.at(ask.who.rank);
        return present != nullptr && present->incarnation >= ask.who.incarnation;
    });
    std::erase_if(cards_, [&](const Card& card) {
        return card.who != self_ && !view.has(card.who) && !shown_.has(card.who) &&
               std::none_of(asks_.begin(), asks_.end(), [&](const Ask& ask) { return ask.who == card.who; });
    });
    if (view.takes_in(self_)) {
        // Whatever this process had is of a past in which the others have no part.
        for (Session& each : sessions_) each = {.position = {.session = each.position.session}, .blank = true};
        for (const Member who : view.members) net_.trust(who.rank, now);
        inside_since_ = now;
        blank_ = true;
    } else if (was_inside && !takes_part()) {
        back_off_ = now - inside_since_ < long_inside ? std::min(2 * back_off_, longest_back_off) : first_back_off;
        knock_at_ = now + back_off_;
    }
    show();
    cards_at_ = lacks_cards() ? now : never;
    beat_at_ = now;
    dirty_ = true;
}

void Views::show() {
    if (latest_.number != 0 && !lacks_cards()) shown_ = latest_;
}

const View* Views::view() const { return shown_.number == 0 ? nullptr : &shown_; }

bool Views::takes_part() const { return latest_.has(self_) || latest_.lets_go(self_); }

bool Views::inside() const { return takes_part() && (shown_.has(self_) || shown_.lets_go(self_)); }

bool Views::frozen() const { return takes_part() && static_cast<bool>(answers_.promised); }

// An outsider knocks, unless it wants to leave or another process has its slot.
bool Views::knocks(Nanos now) const {
    const Member* present = latest_.at(self_.rank);
    const bool replaced = present != nullptr && present->incarnation > self_.incarnation;
    return !takes_part() && !wants_out_ && !replaced && now >= knock_at_;
}

const Views::Card* Views::find_card(Member who) const {
    for (const Card& card : cards_) {
        if (card.who == who) return &card;
    }
    return nullptr;
}

std::optional<std::span<const std::byte>> Views::card(Member who) const {
    const Card* found = find_card(who);
    return found == nullptr ? std::nullopt : std::optional<std::span<const std::byte>>(found->bytes);
}

std::vector<Member> Views::asking() const {
    std::vector<Member> all;
    for (const Ask& ask : asks_) {
        if (find_card(ask.who) != nullptr) all.push_back(ask.who);
    }
    return all;
}

bool Views::lacks_cards() const {
    return std::any_of(latest_.members.begin(), latest_.members.end(),
                       [&](Member who) { return who.incarnation != 0 && who != self_ && find_card(who) == nullptr; });
}

// Asks one process after the other for the first card that is missing.
void Views::fetch_cards(Nanos now) {
    cards_at_ = lacks_cards() ? now + silence_ / 40 : never;
    if (cards_at_ == never) return;
    for (const Member who : latest_.members) {
        if (who.incarnation == 0 || who == self_ || find_card(who) != nullptr) continue;
        const std::uint16_t helper = latest_.members[next_helper_++ % latest_.members.size()].rank;
        // The process itself may be asked too: of two members there is no other, and its address may be known by other means.
        if (helper == self_.rank) continue;
        NoteBody request = make(NoteKind::request);
        request.who = who;
        send(helper, request);
    }
}

NoteBody Views::make(NoteKind kind) const {
    NoteBody note;
    note.kind = kind;
    note.incarnation = self_.incarnation;
    note.number = latest_.number;
    return note;
}

void Views::send(std::uint16_t to, const NoteBody& note) { out_.push_back({to, write_note(note)}); }

Views::Standing Views::standing(Nanos now) const {
    Standing standing;
    for (std::uint16_t rank = 0; rank < capacity_; ++rank) {
        standing.heard_at.push_back(rank == self_.rank ? std::optional(now) : net_.heard_at(rank));
        standing.hears.emplace_back();
        for (const std::uint16_t each : net_.told(rank)) standing.hears.back().push_back(each);
    }
    standing.quorum = is_quorum(latest_, alive());
    standing.proposing = proposing();
    standing.knocking = watching_ && knocks(now);
    return standing;
}

}  // namespace storm
