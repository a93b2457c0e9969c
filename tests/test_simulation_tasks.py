"""What virtual workers learn: stacked batches, losses under vmap, and the files of strangers that they come from."""

import lzma
import pickle
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from stormtorch.bench.settings import BadSetting
from stormtorch.simulation.tasks import TASKS, Task, open_task
from stormtorch.training.atis import PADDING
from stormtorch.training.checkpoints import read_checkpoint
from stormtorch.training.cifar10 import open_cifar10, pack_cifar10
from stormtorch.training.llama import Llama
from stormtorch.training.tasks import Batch
from stormtorch.training.tokens import Tokenizer, open_stories, pack_stories

pytestmark = pytest.mark.pure

WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 16, 24, 2, 2, 32
# Unknown, begin, end; bytes; then characters and what they merge to, the longer the later.
LETTERS = [bytes([byte]) for byte in b" abcdehilnorstuwy.,=<>@-"]
MERGED = [
    b"th",
    b"he",
    b"the",
    b" t",
    b" the",
    b"in",
    b"  ",
    b"er",
    b" a",
    b"an",
    b"and",
    b" and",
    b"\xc3\xa2",
    b" \xc3\xa2",
]
PIECES = [
    b"<unk>",
    b"\n<s>\n",
    b"\n</s>\n",
    *(chr(byte).encode() for byte in range(256)),
    *LETTERS,
    *MERGED,
    b"\xc3\xa2",
    b" \xc3\xa2",
]


# --- files in the layouts that are read -------------------------------------------------------------------------------


def write_tokenizer(path: Path) -> None:
    scores = [-float(number) for number in range(len(PIECES))]
    rows = (struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, PIECES, strict=True))
    path.write_bytes(struct.pack("<i", max(map(len, PIECES))) + b"".join(rows))


def write_checkpoint(path: Path, *, tied: bool = True, heads: int = HEADS, key_heads: int = HEADS) -> dict[str, Any]:
    """Random weights, and the same by the names that llama2.c gives them."""
    random_numbers = np.random.default_rng(0)
    vocabulary = len(PIECES)
    shapes = {
        "embedding": (vocabulary, WIDTH),
        "attention_norm": (LAYERS, WIDTH),
        "wq": (LAYERS, WIDTH, WIDTH),
        "wk": (LAYERS, WIDTH, WIDTH),
        "wv": (LAYERS, WIDTH, WIDTH),
        "wo": (LAYERS, WIDTH, WIDTH),
        "feed_norm": (LAYERS, WIDTH),
        "w1": (LAYERS, HIDDEN, WIDTH),
        "w2": (LAYERS, WIDTH, HIDDEN),
        "w3": (LAYERS, HIDDEN, WIDTH),
        "norm": (WIDTH,),
        "turns": (2, CONTEXT, WIDTH // heads // 2),
    } | ({} if tied else {"classifier": (vocabulary, WIDTH)})
    weights = {name: random_numbers.normal(0, 0.5, shape).astype("<f4") for name, shape in shapes.items()}
    header = WIDTH, HIDDEN, LAYERS, heads, key_heads, vocabulary if tied else -vocabulary, CONTEXT
    path.write_bytes(struct.pack("<7i", *header) + b"".join(each.tobytes() for each in weights.values()))
    return {name: torch.from_numpy(each) for name, each in weights.items()}


def write_wikitext(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["the", "and", "heron", "unit", "th\u00e9", "a", "in", "\u20a4", "\n", "=", "<unk>", "@-@"]
    for seed, (part, count) in enumerate((("train", 9000), ("valid", 8000))):
        chosen = random.Random(seed).choices(words, k=count)
        (folder / f"wiki.{part}.tokens").write_text(" ".join(chosen), encoding="utf-8")


def write_stories(folder: Path) -> Path:
    write_wikitext(folder)
    write_checkpoint(folder / "stories15M.bin")
    write_tokenizer(folder / "tokenizer.bin")
    return folder


def write_cifar10(folder: Path, images: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random_numbers = np.random.default_rng(1)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        rows = random_numbers.integers(0, 256, (images, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / f"{name}.bin")
    return folder


def write_atis(folder: Path, sentences: int = 40) -> Path:
    slots = {"fly": "O", "to": "O", "from": "O", "boston": "B-city", "dallas": "B-city", "monday": "B-day"}
    for seed, part in enumerate(("train", "valid", "test")):
        chooser = random.Random(seed)
        lines = [chooser.choices(sorted(slots), k=chooser.randint(1, 9)) for _ in range(sentences)]
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "seq.in").write_text("\n".join(" ".join(line) for line in lines) + "\n")
        (folder / part / "seq.out").write_text(
            "\n".join(" ".join(slots[word] for word in line) for line in lines) + "\n"
        )
    return folder


def tiny(name: str, folder: Path) -> Task:
    """The task of that name, of files made here."""
    if name == "llama":
        write_wikitext(folder)
        return open_task(name, folder, batch=3, context=16, width=32, layers=2)
    if name == "stories15m":
        return open_task(name, write_stories(folder), batch=2, context=12)
    if name == "lstm":
        return open_task(name, write_atis(folder), batch=3)
    return open_task(name, write_cifar10(folder), batch=2)


# --- what the simulator asks for --------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A task's loss as a module, so that `functional_call` can give it a model's parameters and buffers."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.task.loss(self.model, Batch(inputs, targets))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["llama", "stories15m", "resnet20"])
def test_stacked_workers_under_vmap_get_the_gradients_of_workers_one_by_one(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    losses = [Loss(task, task.model(seed)) for seed in range(3)]
    with torch.no_grad():
        for loss, seed in zip(losses, range(3), strict=True):
            for parameter in loss.parameters():  # also where every seed begins with the same weights
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    parameters, buffers = stack_module_state(losses)
    batch = task.batches(0, 2, 5, 1, 4)

    def one(own: dict[str, Any], moved: dict[str, Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(losses[0], (own, moved), (inputs, targets))
        return found

    together = vmap(one)(parameters, buffers, *batch)
    torch.autograd.backward(together.sum())
    for worker, loss in enumerate(losses):
        alone = loss(batch.inputs[worker], batch.targets[worker])
        alone.backward()
        torch.testing.assert_close(together[worker], alone)
        for key, parameter in loss.named_parameters():
            torch.testing.assert_close(parameters[key].grad[worker], parameter.grad, rtol=1e-3, atol=1e-5)
        for key, buffer in loss.named_buffers():
            torch.testing.assert_close(buffers[key][worker], buffer)
    # What would be equal anyhow shows nothing.
    assert len({round(float(loss), 4) for loss in together.detach()}) == 3


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_seed_step_and_worker_but_not_on_who_else_is_asked_for(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    whole = task.batches(3, 1, 5, 0, 5)
    assert whole.inputs.shape[:1] == whole.targets.shape[:1] == (5,)
    for cut in ((0, 2, 5), (0, 1, 4, 5)):
        parts = [task.batches(3, 1, 5, first, last) for first, last in pairwise(cut)]
        for at in range(2):
            assert torch.equal(torch.cat([part[at] for part in parts]), whole[at])
    for seed, step in ((4, 1), (3, 2)):
        other = task.batches(seed, step, 5, 0, 5)
        assert other.inputs.shape != whole.inputs.shape or not torch.equal(other.inputs, whole.inputs)


@pytest.mark.parametrize("name", TASKS)
def test_a_model_is_that_of_its_seed_and_is_judged_without_being_changed(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    model, same = task.model(7), task.model(7)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(torch.equal(value, same.state_dict()[key]) for key, value in before.items())
    loss, right = task.evaluate(model)
    assert (loss, right) == task.evaluate(model)
    assert loss > 0
    assert 0 <= right <= 1
    assert model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert task.to_json()["model"] == task.name == name
    assert task.language == (name in ("llama", "stories15m"))


@pytest.mark.parametrize("name", ["llama", "stories15m", "resnet20", "lstm"])
def test_a_few_steps_lower_the_loss(tmp_path: Path, name: str) -> None:
    task = tiny(name, tmp_path)
    model = task.model(0)
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.batches(0, 0, 2, 0, 1)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = task.loss(model, Batch(inputs[0], targets[0]))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_the_rate_of_pictures_steps_down_and_that_of_language_falls_as_a_cosine(tmp_path: Path) -> None:
    pictures, language = tiny("resnet20", tmp_path / "a"), tiny("llama", tmp_path / "b")
    assert [pictures.rate(step, 100) for step in (0, 4, 49, 50, 74, 75, 99)] == pytest.approx(
        [0.02, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert language.rate(4, 100) == pytest.approx(language.lr)
    assert language.rate(99, 100) == pytest.approx(language.lr / 10, rel=0.01)


def test_what_is_held_out_of_language_is_as_much_as_was_asked_for_and_counts_every_token(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    task = open_task("llama", tmp_path, context=16, width=32, held_out=5)
    model = task.model(0)
    seen = []
    model.register_forward_hook(lambda _module, given, _scores: seen.append(given[0].shape))
    task.evaluate(model)
    assert sum(shape[0] for shape in seen) == 5
    assert {shape[1] for shape in seen} == {16}


def test_the_record_says_how_many_examples_a_model_was_judged_by(tmp_path: Path) -> None:
    for name, folder in (("resnet20", write_cifar10(tmp_path / "a")), ("lstm", write_atis(tmp_path / "b"))):
        task = open_task(name, folder, held_out=3)
        model = task.model(0)
        seen: list[int] = []
        model.register_forward_hook(lambda _module, given, _scores, seen=seen: seen.append(len(given[0])))
        task.evaluate(model)
        assert task.to_json()["held_out"] == sum(seen) == 3
        everything = open_task(name, folder, held_out=1000).to_json()
        assert everything == open_task(name, folder).to_json()
        assert everything["held_out"] in (8, 40)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_every_picture_comes_once_in_an_epoch_over_all_workers(tmp_path: Path) -> None:
    task = open_task("resnet20", write_cifar10(tmp_path), batch=2)
    pictures = open_cifar10(tmp_path)
    labels = torch.cat([task.batches(0, step, 5, 0, 5).targets.flatten() for step in range(4)])
    assert torch.equal(labels.bincount(minlength=10), pictures.training_labels.bincount(minlength=10))


def test_a_picture_is_cut_out_of_itself_with_a_margin_and_sometimes_mirrored(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, images=1)
    raw = open_cifar10(folder).training.float()
    scaled = (raw - raw.mean((0, 2, 3)).view(-1, 1, 1)) / raw.std((0, 2, 3)).view(-1, 1, 1)
    padded = nn.functional.pad(scaled, (4,) * 4)
    cuts = [padded[:, :, down : down + 32, right : right + 32] for down in range(9) for right in range(9)]
    known = torch.stack([each for cut in cuts for each in (cut, cut.flip(3))])
    task = open_task("resnet20", folder, batch=5)
    kinds = set()
    for step in range(6):
        for picture in task.batches(0, step, 1, 0, 1).inputs[0]:
            nearest = (known - picture).abs().amax((2, 3, 4)).amin(1)
            assert float(nearest.min()) < 1e-4
            kinds.add(int(nearest.argmin()))
    assert len(kinds) > 15
    assert {kind % 2 for kind in kinds} == {0, 1}


@pytest.mark.parametrize(("images", "parts"), [(None, 1), (None, 3), (17, 1), (17, 2)])
def test_a_pack_gives_back_every_byte(tmp_path: Path, images: int | None, parts: int) -> None:
    folder = write_cifar10(tmp_path / "plain")
    paths = pack_cifar10(folder, tmp_path / "packed" / "cifar10.pack", images=images, parts=parts)
    assert len(paths) == parts
    before, after = open_cifar10(folder), open_cifar10(paths[0] if parts == 1 else tmp_path / "packed")
    assert torch.equal(after.training, before.training[:images])
    assert torch.equal(after.training_labels, before.training_labels[:images])
    assert torch.equal(after.validation, before.validation)
    assert torch.equal(after.validation_labels, before.validation_labels)


def test_a_pack_of_smooth_pictures_is_smaller_than_they_are(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "plain")
    slope = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8)
    for path in folder.iterdir():
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        rows[:, 1:] = np.tile(slope.ravel(), 3)
        rows.tofile(path)
    (packed,) = pack_cifar10(folder, tmp_path / "cifar10.pack")
    assert packed.stat().st_size < 2000
    assert torch.equal(open_cifar10(packed).training, open_cifar10(folder).training)


def test_a_part_of_a_pack_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    paths = pack_cifar10(write_cifar10(tmp_path / "plain"), tmp_path / "packed" / "cifar10.pack", parts=2)
    with pytest.raises(BadSetting, match="2 of 2"):
        open_task("resnet20", paths[1])
    paths[0].unlink()
    with pytest.raises(BadSetting, match="all parts of one pack") as caught:
        open_task("resnet20", tmp_path / "packed")
    assert caught.value.name == "data"


def test_pickled_batches_are_the_same_pictures_as_binary_ones(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "plain")
    (tmp_path / "pickled").mkdir()
    for path in folder.iterdir():
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        batch = {b"labels": rows[:, 0].tolist(), b"data": np.ascontiguousarray(rows[:, 1:])}
        (tmp_path / "pickled" / path.stem).write_bytes(pickle.dumps(batch, protocol=2))
    assert torch.equal(open_cifar10(tmp_path / "pickled").training, open_cifar10(folder).training)


# --- tokens and checkpoints -------------------------------------------------------------------------------------------


def test_words_are_encoded_as_the_whole_text_would_be_and_decode_to_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.bin")
    tokenizer = Tokenizer.read(tmp_path / "tokenizer.bin", len(PIECES))
    chooser = random.Random(0)
    for _ in range(50):
        text = "".join(chooser.choices(" thean.\n\u00e2\u20a4x", k=chooser.randint(1, 40)))
        tokens = tokenizer.encode(text)
        assert tokens == tokenizer.merged(f" {text}")
        assert tokenizer.decode(tokens) == f" {text}"
    assert tokenizer.encode("") == []
    assert [PIECES[token] for token in tokenizer.encode("the land")] == [b" the", b" ", b"l", b"and"]


def test_a_character_without_a_token_becomes_bytes_that_merge_with_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.bin")
    tokenizer = Tokenizer.read(tmp_path / "tokenizer.bin", len(PIECES))
    # The first byte of the lira is called like a character that has a token, alone and behind a space.
    assert tokenizer.encode("\u20a4") == [259, *(3 + byte for byte in "\u20a4".encode())]
    assert [PIECES[token] for token in tokenizer.encode("\u00e2")] == [b" \xc3\xa2"]


def reference(weights: dict[str, Any], tokens: list[int], heads: int) -> torch.Tensor:
    """llama2.c's forward, token by token and head by head, with pairs (2i, 2i + 1) turned together."""

    def norm(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vector / (vector.square().mean() + 1e-5).sqrt() * weight

    def turned(vector: torch.Tensor, place: int) -> torch.Tensor:
        out = vector.clone()
        size = WIDTH // heads
        for at in range(0, WIDTH, 2):
            angle = torch.tensor(place * 10_000.0 ** (-(at % size) / size))
            out[at] = vector[at] * angle.cos() - vector[at + 1] * angle.sin()
            out[at + 1] = vector[at] * angle.sin() + vector[at + 1] * angle.cos()
        return out

    hidden = [weights["embedding"][token] for token in tokens]
    for layer in range(LAYERS):
        normed = [norm(each, weights["attention_norm"][layer]) for each in hidden]
        queries = [turned(weights["wq"][layer] @ each, place) for place, each in enumerate(normed)]
        keys = [turned(weights["wk"][layer] @ each, place) for place, each in enumerate(normed)]
        values = [weights["wv"][layer] @ each for each in normed]
        for place in range(len(tokens)):
            seen = []
            for head in range(heads):
                own = slice(head * WIDTH // heads, (head + 1) * WIDTH // heads)
                scores = torch.stack([queries[place][own] @ keys[past][own] for past in range(place + 1)])
                shares = (scores / (WIDTH // heads) ** 0.5).softmax(0)
                seen.append(sum(share * values[past][own] for past, share in enumerate(shares)))
            hidden[place] = hidden[place] + weights["wo"][layer] @ torch.cat(seen)
        for place, each in enumerate(hidden):
            inner = norm(each, weights["feed_norm"][layer])
            gate = nn.functional.silu(weights["w1"][layer] @ inner) * (weights["w3"][layer] @ inner)
            hidden[place] = each + weights["w2"][layer] @ gate
    writer = weights.get("classifier", weights["embedding"])
    return torch.stack([writer @ norm(each, weights["norm"]) for each in hidden])


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_llama2_c_scores_as_its_own_program_would(tmp_path: Path, tied: bool) -> None:
    weights = write_checkpoint(tmp_path / "model.bin", tied=tied)
    size, state = read_checkpoint(tmp_path / "model.bin")
    model = Llama(size)
    model.load_state_dict(state)
    tokens = [1, 260, 270, 265, 280, 3]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([tokens]))[0], reference(weights, tokens, HEADS), rtol=1e-3, atol=1e-4
        )


def test_packed_stories_are_the_same_tokens_and_weights_as_float16(tmp_path: Path) -> None:
    folder = write_stories(tmp_path / "plain")
    pack_stories(folder, folder, tmp_path / "stories.pt")
    before, after = open_stories(folder), open_stories(tmp_path / "stories.pt")
    assert after.size == before.size
    assert torch.equal(after.training, before.training)
    assert torch.equal(after.validation, before.validation)
    assert after.state.keys() == before.state.keys()
    assert all(torch.equal(after.state[name], weight.half().float()) for name, weight in before.state.items())
    assert (before.to_json()["weights"], after.to_json()["weights"]) == ("float32", "float16")
    assert open_task("stories15m", tmp_path / "stories.pt", context=12).evaluate(Llama(after.size))[0] > 0


def test_wikitext_may_be_compressed(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    plain = open_task("llama", tmp_path).to_json()
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    assert open_task("llama", tmp_path).to_json() == plain


# --- sentences --------------------------------------------------------------------------------------------------------


def test_what_is_behind_a_sentence_does_not_count(tmp_path: Path) -> None:
    task = tiny("lstm", tmp_path)
    model = task.model(0)
    batch = task.batches(0, 0, 4, 0, 4)
    words, slots = batch.inputs[0], batch.targets[0]
    assert bool((slots == PADDING).any())
    scores = model(words).log_softmax(-1)
    places = [(row, at) for row in range(len(words)) for at in range(words.shape[1]) if slots[row, at] != PADDING]
    expected = -sum(float(scores[row, at, slots[row, at]].detach()) for row, at in places) / len(places)
    assert float(task.loss(model, Batch(words, slots)).detach()) == pytest.approx(expected, rel=1e-5)


# --- what is refused, and by which name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knobs", "knob"),
    [
        ("gpt", {}, "model"),
        ("resnet20", {"width": 64}, "width"),
        ("lstm", {"context": 64}, "context"),
        ("stories15m", {"layers": 2}, "layers"),
        ("stories15m", {}, "data"),
        ("lstm", {}, "data"),
        ("llama", {"width": 40}, "width"),
        ("llama", {"layers": 0}, "layers"),
        ("llama", {"lr": 0.0}, "lr"),
        ("llama", {"batch": 0}, "batch"),
        ("llama", {"held_out": 0}, "held_out"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, knobs: dict[str, Any], knob: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_task(name, **knobs)
    assert caught.value.name == knob


@pytest.mark.parametrize("name", TASKS)
def test_data_that_are_missing_or_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_bytes(b"nothing of that kind")
    for data in ("missing", "empty", "short"):
        with pytest.raises(BadSetting) as caught:
            open_task(name, tmp_path / data)
        assert caught.value.name == "data"


@pytest.mark.parametrize("file", ["stories15M.bin", "tokenizer.bin"])
def test_stories_that_are_cut_short_are_refused(tmp_path: Path, file: str) -> None:
    path = write_stories(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadSetting, match=file) as caught:
        open_stories(tmp_path)
    assert caught.value.name == "data"


def test_a_checkpoint_that_shares_keys_among_heads_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.bin", key_heads=1)
    with pytest.raises(BadSetting, match="shares keys among heads"):
        read_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\x0a" + b"\0" * 3072])
def test_a_file_that_is_no_binary_batch_is_refused(tmp_path: Path, content: bytes) -> None:
    (write_cifar10(tmp_path) / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(BadSetting, match="holds no batch of CIFAR-10"):
        open_cifar10(tmp_path)


def test_a_pack_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (path,) = pack_cifar10(write_cifar10(tmp_path / "plain"), tmp_path / "cifar10.pack")
    content = path.read_bytes()
    for damaged in (content[:-100], content[:200] + bytes(50) + content[250:], content[:21] + lzma.compress(b"short")):
        path.write_bytes(damaged)
        with pytest.raises(BadSetting) as caught:
            open_cifar10(path)
        assert caught.value.name == "data"


def test_sentences_and_slots_that_do_not_match_are_refused(tmp_path: Path) -> None:
    path = write_atis(tmp_path) / "train" / "seq.out"
    path.write_text(path.read_text().replace("O", "O O", 1))
    with pytest.raises(BadSetting, match=r"words and \d+ slots in line") as caught:
        open_task("lstm", tmp_path)
    assert caught.value.name == "data"
