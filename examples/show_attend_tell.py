"""A captioner of one's own around vlattn's modules: "Show, Attend and Tell", with a plain loop.

    python examples/show_attend_tell.py --out runs/sat
    python examples/show_attend_tell.py --out runs/sat --data flickr8k --encoder-weights \\
        tf_efficientnet_lite0.in1k.safetensors

Xu et al., ICML 2015: an LSTM whose state asks the grid of the picture, by additive attention, what
to look at for the next word; the attention to each patch, summed over the words, is drawn to 1
("doubly stochastic"). Takes minutes on the built-in scenes. Prints the scores of the test
pictures, and writes `words.png`, the regions of words.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlattn import AdditiveAttention, Caption, Preprocess, Tokenizer, open_image, read_records
from vlattn.attention import KeyValue
from vlattn.caption import Word
from vlattn.data.dataset import CaptionDataset, Example
from vlattn.encoder import TimmEncoder, ViT
from vlattn.evaluation import picture_batches, score_captions
from vlattn.generation import Hypothesis, beam_search
from vlattn.model_folder import write_weights
from vlattn.visualization import contact_sheet

MAX_LEN, BATCH_SIZE = 40, 32


class ShowAttendTell(nn.Module):
    """B captions of T tokens, N patches of width D, V vocabulary."""

    def __init__(self, encoder: nn.Module, vocab_size: int, dim: int = 256):
        super().__init__()
        self.encoder = encoder
        self.attention = AdditiveAttention(dim, encoder.dim, project_value=False, project_out=False)
        self.embed = nn.Embedding(vocab_size, dim)
        self.start = nn.Linear(encoder.dim, 2 * dim)
        self.gate = nn.Linear(dim, encoder.dim)
        self.lstm = nn.LSTMCell(dim + encoder.dim, dim)
        self.hidden = nn.Linear(2 * dim + encoder.dim, dim)
        self.out = nn.Linear(dim, vocab_size)

    def look(self, images: Tensor) -> Tensor:
        """Pixels (B, 3, S_h, S_w), or features that were kept, to features (B, N, D)."""
        return self.encoder(images).tokens if images.dim() == 4 else images.float()

    def begin(self, features: Tensor) -> tuple[KeyValue, tuple[Tensor, Tensor]]:
        """Features (B, N, D) to projected keys and values, and the LSTM's first state and cell."""
        state = self.start(features.mean(1)).tanh()  # (B, 2 * dim)
        return self.attention.project_kv(features), tuple(state.chunk(2, dim=-1))

    def step(self, tokens: Tensor, kv: KeyValue, state: tuple[Tensor, Tensor]):
        """Tokens (B,) to the logits (B, V) of the next, the weights (B, N), and the new state."""
        seen, weights = self.attention.attend(state[0], kv, need_weights=True)  # (B, D), (B, 1, N)
        seen = self.gate(state[0]).sigmoid() * seen
        words = self.embed(tokens)
        state = self.lstm(torch.cat([words, seen], dim=-1), state)
        hidden = self.hidden(torch.cat([words, state[0], seen], dim=-1)).tanh()
        return self.out(F.dropout(hidden, 0.3, self.training)), weights.squeeze(1), state

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher forcing: logits (B, T, V) and weights (B, T, N) for tokens (B, T)."""
        kv, state = self.begin(features)
        steps = []
        for column in tokens.unbind(1):
            *step, state = self.step(column, kv, state)
            steps.append(step)
        return tuple(torch.stack(parts, dim=1) for parts in zip(*steps))


def collate(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Pixels or features of the pictures that can be read, and a caption of each, padded by 0."""
    readable = [e for e in examples if isinstance(e.image, Tensor)]
    captions = [torch.tensor(e.captions[0]) for e in readable]
    return torch.stack([e.image for e in readable]), pad_sequence(captions, batch_first=True)


def loss_of(model: ShowAttendTell, features: Tensor, captions: Tensor, pad_id: int) -> Tensor:
    tokens, targets = captions[:, :-1], captions[:, 1:]
    logits, weights = model(features, tokens)
    real = targets != pad_id  # (B, T)
    looked = (weights * real[..., None]).sum(1)  # (B, N), the doubly stochastic part
    return F.cross_entropy(logits[real], targets[real]) + (1 - looked).square().mean()


@torch.inference_mode()
def write(model: ShowAttendTell, tokenizer: Tokenizer, features: Tensor) -> list[Hypothesis]:
    """The best text of beam search for each picture."""
    kv, state = model.begin(features)

    def step(tokens: Tensor, rows: Tensor) -> Tensor:
        nonlocal kv, state
        kv, state = KeyValue(*(x[rows] for x in kv)), tuple(x[rows] for x in state)
        logits, _, state = model.step(tokens, kv, state)
        return logits

    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "banned": [tokenizer.pad_id]}
    return [best for best, *_ in beam_search(step, len(features), max_len=MAX_LEN, **ids)]


@torch.inference_mode()
def explain(model, tokenizer: Tokenizer, preprocess: Preprocess, image: Any) -> Caption:
    """What the model writes about a picture, and where it looked for each word."""
    picture = open_image(image)
    pixels, geometry = preprocess(picture)
    features, grid_size = model.encoder(pixels[None])
    (text,) = write(model, tokenizer, features)
    tokens = torch.tensor([[tokenizer.bos_id, *text.tokens]])
    logits, weights = model(features, tokens[:, :-1])
    chances = logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])
    spans = tokenizer.words(text.tokens)
    words = [Word(s.text, s.start, s.end, float(chances[s.first : s.last].sum())) for s in spans]
    maps = [weights[0, s.first : s.last].mean(0, keepdim=True) for s in spans]
    maps = torch.cat([weights[0, :0], *maps]).unflatten(1, grid_size)  # (words, gh, gw)
    shown = (maps[:, None, None], maps, text.score, text.finished, picture, geometry)
    return Caption(tokenizer.decode(text.tokens), tuple(words), *shown)


@torch.inference_mode()
def features_of(encoder: TimmEncoder, data: CaptionDataset) -> dict[tuple[int, int], Any]:
    """What a frozen encoder makes of each picture, computed once; None of an unreadable one."""
    kept = dict.fromkeys((i, 0) for i in range(len(data)))  # a picture and its one view
    for batch in picture_batches(data, "encoding", 32, 0):
        for i, features in zip(batch.indices, encoder(batch.images).tokens.half().numpy()):
            kept[i, 0] = features
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="scenes", help="data set of any layout")
    parser.add_argument("--out", type=Path, default=Path("runs/sat"))
    parser.add_argument("--encoder-weights", help="use a frozen EfficientNet-Lite0 with these")
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    # 1. Pictures and captions, whatever their layout; and a vocabulary.
    records, report = read_records(args.data)
    print(report)
    captions = [text for r in records if r.split == "train" for text in r.captions]
    tokenizer = Tokenizer.train(captions, vocab_size=4000)

    # 2. The encoder: our own, which learns, or one of timm, whose features are computed once.
    encoder = ViT((96, 96), dim=128, depth=1, positions="sine", stem=True)
    if args.encoder_weights:
        encoder = TimmEncoder("tf_efficientnet_lite0")
        encoder.load_weights(args.encoder_weights)
    preprocess = Preprocess(encoder.image_size, mean=encoder.mean, std=encoder.std)
    data = {}
    for split in ("train", "test"):
        chosen = [record for record in records if record.split == split]
        limits = {"max_len": MAX_LEN, "captions_per_image": 1}
        data[split] = CaptionDataset(chosen, tokenizer, preprocess, **limits)
        if args.encoder_weights:
            data[split].features = features_of(encoder, data[split])

    # 3. The loop.
    model = ShowAttendTell(encoder, tokenizer.vocab_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps)
    batches = itertools.chain.from_iterable(
        DataLoader(data["train"].epoch(number), BATCH_SIZE, shuffle=True, collate_fn=collate)
        for number in itertools.count()
    )
    for _, (images, captions) in zip(bar := tqdm(range(args.steps), "training"), batches):
        loss = loss_of(model, model.look(images), captions, tokenizer.pad_id)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    write_weights(args.out / "model.safetensors", model.state_dict(), tokenizer.digest)
    tokenizer.save(args.out / "tokenizer.json")

    # 4. Scores of the test pictures, and the regions of some words.
    model.eval()
    test, written = data["test"].records, {}
    for batch in picture_batches(data["test"], "captions", 100, 0):
        for index, text in zip(batch.indices, write(model, tokenizer, model.look(batch.images))):
            written[test[index].name] = tokenizer.decode(text.tokens)
    print(f"{len(written)} test pictures: {score_captions(written, test)}")
    shown = [explain(model, tokenizer, preprocess, record.image) for record in test[:6]]
    contact_sheet(shown).save(args.out / "words.png")


if __name__ == "__main__":
    main()
