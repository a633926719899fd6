"""Make the demo pair from a seed: corpus, tokenizer, target, draft, judge tuples, judge head, all into ``demo/``.

The target reads every wording and prefers the first; it also reads answers that go wrong and mend themselves, so that its
state at a wrong number knows. The draft learns only the second wording. What each must not learn to say is read but not
learned: mistakes are left out of the loss, and where a wording is not the model's own, it learns to put its own there.

The script saves its state in ``--work`` every few minutes and takes up from there when it is run again; ``--out`` is only
touched when everything is done.
"""

from __future__ import annotations

import io
import operator
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import demo_task as task
import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from checkpoint import fingerprint, load_model
from engine import Engine
from files import replacing, write_json, write_jsonl, write_text
from judge import Head, Tuple, read_labels
from model import Config, Transformer
from tokenizer import Tokenizer, load_tokenizer
from training import as_features, labels_of, read_states, train_head
from writer import save_checkpoint

BOS, EOS = 1, 2
VOCAB_SIZE = 640
PREFERENCE = (0.7, 0.2, 0.1)  # how often an answer takes each wording where the target learns them all, its favourite first
FOREIGN = (0.15, 0.8, 0.05)  # the same where it learns its favourite only: as texts look once a judge lets the draft's words stand
FOREIGN_SHARE = 0.5  # of the target's answers
ONE_STEP = 0.5  # share of the problems that have one step only: short rows teach copying and arithmetic soonest
DRILLS = 0.35  # rows of bare equations for each problem
DRILL_LENGTH = 128  # tokens of such a row, at most

WIDTHS = (80, 104, 128, 168)  # row lengths that training pads to
TUPLES = 500  # (question, correct answer, wrong answer, mistake) for the judge
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}Question: {{ message.content }}\nAnswer:"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SAVE_EVERY = 250  # steps; the corpus starts a new seeded stream at each, so a resumed run reads what an unbroken one would


class Mistakes(NamedTuple):
    """How a corpus goes wrong and mends itself."""

    share: float  # of the answers
    drill_share: float  # of the bare equations
    counts: tuple[int, ...]  # mistakes in such an answer, one of these
    break_off: float  # share that breaks off at the first wrong token: the state there has to know at once
    weight: float  # of the correction in the loss


NO_MISTAKES = Mistakes(0.0, 0.0, (1,), 0.0, 0.0)
EARLY = Mistakes(0.4, 0.1, (1, 1, 2), 0.6, 1.0)
LATE = Mistakes(0.9, 0.5, (1, 2, 3), 0.9, 2.0)  # a model can notice a wrong number only once it can calculate
LATE_FROM = 0.35  # share of the target's steps


@dataclass(frozen=True)
class Recipe:
    """One model's shape and training."""

    name: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    steps: int
    batch_tokens: int

    def hf_config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "intermediate_size": self.ffn_dim,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "torch_dtype": "bfloat16",
        }


TARGET = Recipe("target", 80, 20, 4, 4, 216, 6000, 2048)
DRAFT = Recipe("draft", 48, 2, 4, 4, 144, 2500, 2048)
MUON_RATE, ADAM_RATE, WARM_UP = 0.01, 3e-3, 50  # peaks, then straight down to 0 at the last step


# --- corpus ---------------------------------------------------------------------------------------------------------


def train_tokenizer(seed: str) -> bytes:
    """Train the shared SentencePiece model (BPE, digits one by one, byte fallback) and return it serialised."""
    rng = random.Random(f"{seed} tokenizer")
    lines: list[str] = []
    for _ in range(6000):
        problem = task.make_problem(rng)
        answer = task.to_text(task.write_solution(problem, rng, (1, 1, 1)))
        lines += [f"Question: {problem.question}", f"Answer:{answer}{rng.choice(task.MENDS)}"]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        split_digits=True,
        byte_fallback=True,
        character_coverage=1.0,
        # the text comes back byte for byte: nothing is normalised, no space is put in front
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


class Token(NamedTuple):
    """A token of a training text: what is read, what is to be said in its place, and how much that counts in the loss."""

    read: int
    say: int
    weight: float


Row = list[Token]
Shares = tuple[float, float, float]  # how often each wording is taken
Add = Callable[[int, int], int]


def said(ids: list[int], weight: float) -> Row:
    """Tokens that are to be said as they are read."""
    return [Token(i, i, weight) for i in ids]


class Writer:
    """Turns problems into training texts for a model that has `wordings` for its own, the favourite first."""

    def __init__(self, tokenizer: spm.SentencePieceProcessor, wordings: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.wordings = wordings
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a piece; pieces repeat, so they are kept."""
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text)
        return self.cache[text]

    def prompt(self, problem: task.Problem) -> list[int]:
        """The ids of a question, exactly as the chat template and the tokenizer give them."""
        return [BOS, *self.tokenizer.encode(f"Question: {problem.question}\nAnswer:")]

    def piece(self, piece: task.Piece, worked_out: bool) -> Row:
        """A right piece. It counts most where something has to be worked out or found in the question, little where any
        wording will do; in place of a wording that isn't the model's own, its favourite is to be said."""
        ids = self.encode(piece.text)
        if worked_out or piece.kind in ("item", "box"):
            return said(ids, 3.0)
        if piece.wording is None or piece.wording in self.wordings:
            return said(ids, 1.0 if piece.kind == "number" or piece.kind in task.CONFUSED else 0.2)
        favourite = self.encode(task.WORDINGS[piece.kind][self.wordings[0]])
        return [Token(ids[0], favourite[0], 1.0 if piece.kind in task.CONFUSED else 0.2), *said(ids[1:], 0.2)]

    def answer(self, pieces: list[task.Piece], rng: random.Random, mistakes: Mistakes) -> Row:
        """An answer; as often as `mistakes` says, some of its pieces first go wrong and are mended."""
        wrong: set[int] = set()
        if rng.random() < mistakes.share:
            places = [i for i, p in enumerate(pieces) if task.can_go_wrong(p) and (p.kind == "number" or rng.random() < 0.5)]
            wrong = set(rng.sample(places, min(len(places), rng.choice(mistakes.counts))))
        row: Row = []
        for i, piece in enumerate(pieces):
            if i in wrong:
                head, tail = self._mistake(piece, pieces[i + 1] if i + 1 < len(pieces) else None, rng, mistakes.break_off)
                row += said(head, 1.0) + said(tail, 0.0) + said(self.encode(rng.choice(task.MENDS)), mistakes.weight)
            row += self.piece(piece, piece.kind == "number" and i > 0 and pieces[i - 1].kind == "equals")
        return row

    def _mistake(
        self, piece: task.Piece, after: task.Piece | None, rng: random.Random, break_off: float
    ) -> tuple[list[int], list[int]]:
        """A wrong form of a piece, cut where it goes wrong; as often as `break_off` says it ends with the first wrong token."""
        right, wrong = self.encode(piece.text), self.encode(task.wrong_form(piece, rng))
        same = 0
        while same < min(len(right), len(wrong)) and right[same] == wrong[same]:
            same += 1
        if same == len(wrong):  # a number too short goes wrong at the token that follows it
            wrong = wrong + (self.encode(after.text)[:1] if after else [EOS])
        end = same + 1 if rng.random() < break_off else len(wrong)
        return wrong[:same], wrong[same:end]


def drill_row(writer: Writer, rng: random.Random, shares: Shares, mistakes: Mistakes, add: Add = operator.add) -> Row:
    """Bare equations like those in the answers, up to DRILL_LENGTH tokens."""
    row = said([BOS], 0.0)
    while True:
        sign = rng.choice(("plus", "minus", "times"))
        if sign == "times":
            a, b = rng.randint(2, 8), rng.randint(3, 24)
            c = a * b
        else:
            a, b = rng.randint(10, 99), rng.randint(10, 60)
            c = add(a, b if sign == "plus" else -b)
        if not 10 <= c <= (60 if sign == "times" else 99):
            continue
        words = [rng.choices(range(3), weights=shares)[0] for _ in range(2)]
        given = f" {a}{task.WORDINGS[sign][words[0]]} {b}"  # can't be foretold
        pieces = [
            task.Piece(task.WORDINGS["equals"][words[1]], "equals", words[1]),
            task.Piece(f" {c}", "number"),
            task.Piece(".", "glue"),
        ]
        more = said(writer.tokenizer.encode(given), 0.0) + writer.answer(pieces, rng, mistakes._replace(share=mistakes.drill_share))
        if len(row) + len(more) > DRILL_LENGTH:
            return row
        row += more


def story_row(
    writer: Writer, problem: task.Problem, shares: Shares, rng: random.Random, mistakes: Mistakes, add: Add = operator.add
) -> Row:
    """A question and its answer, each wording taken as often as `shares` says."""
    answer = writer.answer(task.write_solution(problem, rng, shares, add), rng, mistakes)
    return [*said(writer.prompt(problem), 0.0), *answer, Token(EOS, EOS, 1.0)]


def target_rows(tokenizer: spm.SentencePieceProcessor, seed: str, late: bool, unseen: frozenset[str]) -> Iterator[Row]:
    """The target's corpus without end: all wordings, some answers mended, half in the draft's words, some drills."""
    rng = random.Random(f"{seed} target")
    every, first = Writer(tokenizer, (task.FIRST, task.SECOND, task.THIRD)), Writer(tokenizer, (task.FIRST,))
    mistakes = LATE if late else EARLY
    for problem in task.training_problems(rng, unseen, ONE_STEP):
        writer, shares = (first, FOREIGN) if rng.random() < FOREIGN_SHARE else (every, PREFERENCE)
        yield story_row(writer, problem, shares, rng, mistakes)
        if rng.random() < DRILLS:
            yield drill_row(every, rng, PREFERENCE, mistakes)


def draft_rows(tokenizer: spm.SentencePieceProcessor, seed: str, unseen: frozenset[str]) -> Iterator[Row]:
    """The draft's corpus: the second wording, and sums done carelessly, so that how often it is wrong hangs on no training
    luck. In a third of it the target's wordings are strewn in, as the draft has to go on from them after a rejection."""
    rng = random.Random(f"{seed} draft")
    writer = Writer(tokenizer, (task.SECOND,))
    for problem in task.training_problems(rng, unseen, ONE_STEP):
        shares = (0.75, 0.25, 0.0) if rng.random() < 1 / 3 else (0.0, 1.0, 0.0)
        yield story_row(writer, problem, shares, rng, NO_MISTAKES, task.careless_add)
        if rng.random() < DRILLS:
            yield drill_row(writer, rng, (0.0, 1.0, 0.0), NO_MISTAKES, task.careless_add)


def batches(rows: Iterator[Row], batch_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens to read, tokens to say and their weights, each [B, T + 1]: rows of like length together, so that only a few
    fixed shapes occur."""
    bins: dict[int, list[Row]] = {width: [] for width in WIDTHS}
    for row in rows:
        width = next((w for w in WIDTHS if len(row) <= w + 1), None)
        if width is None:
            continue
        bins[width].append(row)
        if len(bins[width]) == batch_tokens // width:
            padded = [row + [Token(EOS, EOS, 0.0)] * (width + 1 - len(row)) for row in bins[width]]
            bins[width] = []
            read, say, weights = (torch.tensor([[t[i] for t in row] for row in padded]) for i in range(3))
            yield read, say, weights


# --- training -------------------------------------------------------------------------------------------------------


def init_weights(model: Transformer, seed: int) -> None:
    """Normal weights; what writes to the residual stream starts smaller the deeper the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        std = 0.02 if "embed" in name or "output" in name else parameter.shape[1] ** -0.5
        if name.endswith(("wo.weight", "w2.weight")):
            std /= (2 * model.config.n_layers) ** 0.5
        torch.nn.init.normal_(parameter, std=std, generator=generator)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of [N, rows, columns] towards 1 (five Newton-Schulz steps, as in Muon)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, all matrices of one shape at once. At this size it learns in about half
    the steps that AdamW takes."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(torch.lerp(p.grad, momentum, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates))):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def loss_of(model: Transformer, read: Tensor, say: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy; tokens of weight 0 are read only. Arguments as `batches` gives them."""
    target, weight = say[:, 1:], weights[:, 1:]
    counts = weight > 0
    logits = model.output(model.norm(model.hidden(read[:, :-1])[counts]))
    return (F.cross_entropy(logits, target[counts], reduction="none") * weight[counts]).sum() / weight.sum()


def train(recipe: Recipe, corpus: Callable[[str, int], Iterator[Row]], seed: int, work: Path) -> dict[str, Tensor]:
    """Train one model, or go on with it from its last saved state, and return its weights in bf16."""
    model = Transformer(Config.from_hf(recipe.hf_config()))
    init_weights(model, seed)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    matrices = [p for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("layers") and p.ndim == 2)]
    muon = Muon(matrices, lr=0.0)
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    state_path = work / f"{recipe.name}.pt"
    first = 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
    mean_loss = 0.0
    bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, desc=recipe.name, mininterval=5, disable=None)
    for step in bar:
        if step == first or step % SAVE_EVERY == 0:
            stream = batches(corpus(f"{seed} {step // SAVE_EVERY}", step), recipe.batch_tokens)
        share = min((step + 1) / WARM_UP, 1 - step / recipe.steps)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = share * MUON_RATE, share * ADAM_RATE
        loss = loss_of(model, *next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean_loss = loss.item() if step == first else 0.98 * mean_loss + 0.02 * loss.item()
        bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == recipe.steps:
            state = {
                "step": step + 1,
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
            }
            with replacing(state_path) as partial:
                torch.save(state, partial)
    return {name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()}


def save_model(folder: Path, recipe: Recipe, weights: dict[str, Tensor], tokenizer: bytes) -> None:
    """Write a checkpoint folder as any chat model's: weights in bf16, tokenizer, chat template, stop token."""
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, recipe.hf_config(), weights)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "single_task": "little sums in words, a question at a time"}
    write_json(folder / "generation_config.json", generation)


# --- judge ----------------------------------------------------------------------------------------------------------


def planted_mistake(pieces: list[task.Piece], rng: random.Random) -> tuple[str, tuple[int, int]]:
    """The answer with one piece gone wrong, and where."""
    at = rng.choice([i for i, p in enumerate(pieces) if task.can_go_wrong(p)])
    before, after = task.to_text(pieces[:at]), task.to_text(pieces[at + 1 :])
    wrong = task.wrong_form(pieces[at], rng)
    start = len(before) + task.first_difference(pieces[at].text, wrong)
    # a number too short is wrong at the character that follows it
    return before + wrong + after, (start, max(len(before) + len(wrong), start + 1))


def own_mistake(pieces: list[task.Piece], said: str) -> tuple[int, int] | None:
    """Where an answer in the draft's wording first leaves the right one, to the end of that word. None where it doesn't."""
    right = task.to_text(pieces)
    start = task.first_difference(right, said)
    if start == len(said):
        return None
    end = start + 1
    while end < len(said) and said[end].isalnum() and said[start].isalnum():
        end += 1
    return start, end


def make_tuples(draft: Transformer, tokenizer: Tokenizer, seed: int, unseen: frozenset[str]) -> list[Tuple]:
    """The judge's training set: half the wrong answers are the draft's own, half have a mistake planted in the draft's
    wording; the right ones are in any mixture of wordings."""
    rng = random.Random(f"{seed} tuples")
    engine = Engine(draft, max_len=384)
    tuples: list[Tuple] = []
    own = 0
    with tqdm(total=TUPLES, desc="judge tuples", disable=None) as bar:
        for problem in task.training_problems(rng, unseen):
            if len(tuples) == TUPLES:
                break
            correct = task.to_text(task.write_solution(problem, rng, rng.choice([(1, 1, 1), (0, 1, 0), (1, 1, 0)])))
            spoken = task.write_solution(problem, rng, (0, 1, 0))
            if own < TUPLES // 2:
                wrong = tokenizer.decode(engine.complete(tokenizer.encode_question(problem.question), 200, {EOS}))
                span = own_mistake(spoken, wrong)
                if span is None:
                    continue
                own += 1
            else:
                wrong, span = planted_mistake(spoken, rng)
            tuples.append(Tuple(problem.question, correct, wrong, span))
            bar.update()
    return tuples


def begin(work: Path, run: str) -> None:
    """Make the folder for this run's state. Raises UserError where it holds another run's."""
    work.mkdir(parents=True, exist_ok=True)
    mark = work / "run.txt"
    if not mark.exists() and any(work.iterdir()):
        raise UserError(f"--work {work} holds files of something else; choose an empty folder")
    if mark.exists() and mark.read_text(encoding="utf-8") != run:
        raise UserError(f"--work {work} holds another run ({mark.read_text(encoding='utf-8')}); choose another folder")
    write_text(mark, run)


def train_judge(pair: Path, seed: int, unseen: frozenset[str]) -> None:
    """Make the tuples, unless they are there, and the head from them."""
    tokenizer, path = load_tokenizer(pair / "target"), pair / "judge_tuples.jsonl"
    if not path.exists():
        tuples = make_tuples(load_model(pair / "draft", torch.float32), tokenizer, seed, unseen)
        write_jsonl(path, [item._asdict() for item in tuples])
    target, examples = load_model(pair / "target", torch.float32), read_labels(path, tokenizer)
    states = as_features(target, read_states(target, examples).states, "post_norm")
    # ten times the published rate: on so small a model's states the fit is the same, and there ten times sooner
    result = train_head(states, *labels_of(examples), seed=seed, lr=1e-3)
    Head(result.weight, result.bias, "post_norm", "demo/target", fingerprint(pair / "target")).save(pair / "judge.pt")
    at = result.at(0.5)
    print(f"judge: AUC {result.auc:.4f}; at δ = 0.5 {at.recall:.1%} of wrong tokens are stopped, {at.kept:.1%} of right ones kept")


def main() -> None:
    """Run every stage that isn't done yet."""
    parser = Parser(
        description="Train the demo pair and its judge from a seed; 100 minutes on one thread, and what was interrupted goes on."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo", metavar="DIR", help="folder for the pair (default: demo/)")
    work = ROOT / "checkpoints" / "demo-work"
    parser.add_argument("--work", type=Path, default=work, metavar="DIR",
                        help="folder that a run goes on from (default: checkpoints/demo-work)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it (default: 0)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's)")
    args = parser.parse_args()
    if args.threads is not None:
        if args.threads < 1:
            raise UserError(f"--threads is {args.threads}; it must be at least 1")
        torch.set_num_threads(args.threads)
    begin(args.work, f"seed {args.seed}, {TARGET}, {DRAFT}")
    torch._dynamo.config.recompile_limit = 64  # a handful of row lengths, each compiled once

    tokenizer_file = args.work / "tokenizer.model"
    if not tokenizer_file.exists():
        with replacing(tokenizer_file) as partial:
            partial.write_bytes(train_tokenizer(str(args.seed)))
    pieces = spm.SentencePieceProcessor(model_file=str(tokenizer_file))
    unseen = frozenset(problem.question for problem in task.unseen_problems(1000))
    corpora = (
        (TARGET, lambda s, step: target_rows(pieces, s, step >= LATE_FROM * TARGET.steps, unseen)),
        (DRAFT, lambda s, _: draft_rows(pieces, s, unseen)),
    )
    pair = args.work / "pair"
    for recipe, corpus in corpora:
        weights = train(recipe, corpus, args.seed, args.work)
        if not (pair / recipe.name / "config.json").exists():
            save_model(pair / recipe.name, recipe, weights, tokenizer_file.read_bytes())
    train_judge(pair, args.seed, unseen)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in (TARGET.name, DRAFT.name):
        shutil.copytree(pair / part, args.out / part, dirs_exist_ok=True)
    for part in ("judge_tuples.jsonl", "judge.pt"):
        shutil.copyfile(pair / part, args.out / part)


if __name__ == "__main__":
    run_cli(main)
