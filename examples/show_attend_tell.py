"""A captioner of one's own around vlattn's modules: "Show, Attend and Tell", with a plain loop.

    python examples/show_attend_tell.py --out runs/sat
    python examples/show_attend_tell.py --data flickr8k --encoder-weights FILE

Xu et al., ICML 2015: an LSTM whose state asks the grid of the picture, by additive attention, what
to look at for the next word; the attention to each patch, summed over the words, is drawn to 1
("doubly stochastic"). Prints the scores of the test pictures; `words.png` shows where words look.
"""

import argparse
import itertools
from pathlib import Path

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
from vlattn.evaluation import picture_bar, picture_batches, score_captions
from vlattn.generation import Hypothesis, beam_search
from vlattn.model_folder import write_weights
from vlattn.visualization import contact_sheet

MAX_LEN, BATCH_SIZE = 40, 16
EVENNESS = 0.1  # 1 in the paper, which has 196 patches: of 36 or 49, it would ask for even maps


class ShowAttendTell(nn.Module):
    """B captions of T tokens, N patches of width D, V vocabulary; all else has width `dim`."""

    def __init__(self, encoder: nn.Module, vocab_size: int, dim: int = 256):
        super().__init__()
        self.encoder = encoder
        self.narrow = nn.Linear(encoder.dim, dim)
        self.attention = AdditiveAttention(dim, project_value=False, project_out=False)
        self.start, self.gate = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.lstm, self.hidden = nn.LSTMCell(2 * dim, dim), nn.Linear(3 * dim, dim)
        self.embed, self.out = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)

    def look(self, images: Tensor) -> Tensor:
        """Pixels (B, 3, S_h, S_w), or features that were kept, to features (B, N, D)."""
        return self.encoder(images).tokens if images.dim() == 4 else images.float()

    def begin(self, features: Tensor) -> tuple[KeyValue, tuple[Tensor, Tensor]]:
        """Features (B, N, D) to projected keys and values, and the LSTM's first state and cell."""
        features = self.narrow(features)  # (B, N, dim)
        state = self.start(features.mean(1)).tanh()  # (B, 2 * dim)
        return self.attention.project_kv(features), tuple(state.chunk(2, dim=-1))

    def step(self, words: Tensor, kv: KeyValue, state: tuple[Tensor, Tensor]):
        """Embeddings (B, dim) to what the next word follows from, weights (B, N), the new state."""
        seen, weights = self.attention.attend(state[0], kv, need_weights=True)  # weights (B, 1, N)
        seen = self.gate(state[0]).sigmoid() * seen
        state = self.lstm(torch.cat([words, seen], dim=-1), state)
        return torch.cat([words, state[0], seen], dim=-1), weights.squeeze(1), state

    def logits(self, told: Tensor) -> Tensor:
        """What `step` gives, (..., 3 * dim), to the logits (..., V) of the next token."""
        return self.out(F.dropout(self.hidden(told).tanh(), 0.3, self.training))

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher forcing: logits (B, T, V) and weights (B, T, N) for tokens (B, T)."""
        kv, state = self.begin(features)
        steps = []
        for words in self.embed(tokens).unbind(1):
            *step, state = self.step(words, kv, state)
            steps.append(step)
        told, weights = (torch.stack(parts, dim=1) for parts in zip(*steps))
        return self.logits(told), weights


def collate(examples: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Images that can be read, all their captions, padded by 0, and which image each is of."""
    seen = [e for e in examples if isinstance(e.image, Tensor)]
    captions = pad_sequence([torch.tensor(c) for e in seen for c in e.captions], batch_first=True)
    pictures = torch.tensor([i for i, e in enumerate(seen) for _ in e.captions])
    return torch.stack([e.image for e in seen]), captions, pictures


def loss_of(model: ShowAttendTell, features: Tensor, captions: Tensor, pad_id: int) -> Tensor:
    tokens, targets = captions[:, :-1], captions[:, 1:]
    logits, weights = model(features, tokens)
    real = targets != pad_id  # (B, T)
    looked = (weights * real[..., None]).sum(1)  # (B, N), the doubly stochastic part
    return F.cross_entropy(logits[real], targets[real]) + EVENNESS * (1 - looked).square().mean()


@torch.inference_mode()
def write(model: ShowAttendTell, tokenizer: Tokenizer, features: Tensor) -> list[Hypothesis]:
    """The best text of beam search for each picture."""
    kv, state = model.begin(features)

    def step(tokens: Tensor, rows: Tensor) -> Tensor:
        nonlocal kv, state
        kv, state = KeyValue(*(x[rows] for x in kv)), tuple(x[rows] for x in state)
        told, _, state = model.step(model.embed(tokens), kv, state)
        return model.logits(told)

    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "banned": [tokenizer.pad_id]}
    return [best for best, *_ in beam_search(step, len(features), max_len=MAX_LEN, **ids)]


@torch.inference_mode()
def explain(model, tokenizer: Tokenizer, preprocess: Preprocess, image: object) -> Caption:
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
def features_of(encoder: TimmEncoder, data: CaptionDataset) -> dict[tuple[int, int], object]:
    """What a frozen encoder makes of each picture, computed once; None of an unreadable one."""
    kept = dict.fromkeys((i, 0) for i in range(len(data)))  # a picture and its one view
    with picture_bar(len(data), "encoding") as bar:
        for batch in picture_batches(data, bar, 32, 0):
            for i, features in zip(batch.indices, encoder(batch.images).tokens.half().numpy()):
                kept[i, 0] = features
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="scenes", help="data set of any layout")
    parser.add_argument("--out", type=Path, default=Path("runs/sat"))
    parser.add_argument("--encoder-weights", help="of timm's tf_efficientnet_lite0: use it, frozen")
    parser.add_argument("--steps", type=int, default=1500)
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
    data, limits = {}, {"max_len": MAX_LEN, "captions_per_image": 2}
    for split in ("train", "test"):
        chosen = [record for record in records if record.split == split]
        data[split] = CaptionDataset(chosen, tokenizer, preprocess, **limits)
        if args.encoder_weights:
            data[split].features = features_of(encoder, data[split])

    # 3. The loop.
    model = ShowAttendTell(encoder, tokenizer.vocab_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 7e-4, args.steps, pct_start=0.1)
    batches = itertools.chain.from_iterable(
        DataLoader(data["train"].epoch(number), BATCH_SIZE, shuffle=True, collate_fn=collate)
        for number in itertools.count()
    )
    for _, (images, captions, pictures) in zip(bar := tqdm(range(args.steps), "training"), batches):
        loss = loss_of(model, model.look(images)[pictures], captions, tokenizer.pad_id)
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
    with picture_bar(len(test), "captions") as bar:
        for batch in picture_batches(data["test"], bar, 100, 0):
            texts = write(model, tokenizer, model.look(batch.images))
            for index, text in zip(batch.indices, texts):
                written[test[index].name] = tokenizer.decode(text.tokens)
    print(f"{len(written)} test pictures: {score_captions(written, test)}")
    shown = [explain(model, tokenizer, preprocess, record.image) for record in test[:6]]
    contact_sheet(shown).save(args.out / "words.png")


if __name__ == "__main__":
    main()
