"""Attention step by step, with the numbers of a real captioner, checked against the package.

    python examples/attention_walkthrough.py "a brown dog runs" photo.jpg --html walkthrough.html

Tokens, vectors, self-attention, cross-attention by both scores, the cache, the scale; each part
shows its docstring. Takes seconds, and ends up within about 1e-6 of the package's logits.
"""

import argparse
import sys
from collections import namedtuple
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.cache import sizes, with_and_without
from vlattn import Captioner, Tokenizer, open_image
from vlattn.attention import ATTENTIONS, CrossAttention, causal_mask
from vlattn.data.scenes import scenes
from vlattn.decoder import rotate
from vlattn.page import Page
from vlattn.visualization import contact_sheet

CHINESE = "一只棕色的狗在跑"  # a brown dog runs
ALL = torch.tensor(True)  # a mask
Steps = namedtuple("Steps", "query key value scores scaled weights summed output")


def attend(attn: CrossAttention, x: Tensor, memory: Tensor, mask=ALL, places=None) -> Steps:
    """Attention of x (B, T, D) to the memory (B, N, D), written out; `places` are rotary."""
    query = attn.q_proj(x).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, T, d)
    key, value = attn.project_kv(memory)  # (B, H_kv, N, d)
    if places is not None:
        query, key = rotate(query, places), rotate(key, places)
    key, value = (x.repeat_interleave(attn.num_heads // attn.num_kv_heads, 1) for x in (key, value))
    if isinstance(attn, ATTENTIONS["additive"]):
        pairs = torch.tanh(query[:, :, :, None] + key[:, :, None])  # (B, H, T, N, d)
        scores = scaled = (pairs * attn.score_weight[:, None, None]).sum(-1)  # (B, H, T, N)
    else:
        scores = query @ key.mT  # (B, H, T, N)
        scaled = scores / attn.head_dim**0.5
    scaled = scaled.masked_fill(~mask, -torch.inf)
    weights = scaled.softmax(-1)
    summed = weights @ value  # (B, H, T, d)
    output = attn.out_proj(summed.transpose(1, 2).flatten(2))  # (B, T, D)
    return Steps(query, key, value, scores, scaled, weights, summed, output)


def by_hand(captioner: Captioner, tokens: Tensor, memory: Tensor) -> tuple[list, Tensor]:
    """(input, self-attention, residual, input, cross-attention) of each layer, and the logits."""
    decoder, places = captioner.decoder, torch.arange(tokens.size(1))[None]
    x = decoder.embed(tokens) + (0 if decoder.positions is None else decoder.positions[places])
    mask, layers = causal_mask(tokens.size(1)), []
    for block in decoder.blocks:
        norms, same = (block.norm1, block.norm2, block.norm3), [torch.nn.Identity()] * 3
        before, after = (norms, same) if block.norm_first else (same, norms)
        start = before[0](x)
        past = attend(block.self_attn, start, start, mask, places if block.rotary else None)
        x = after[0](x + past.output)
        between = before[1](x)
        seen = attend(block.cross_attn, between, memory)
        layers.append((start, past, x, between, seen))
        x = after[1](x + seen.output)
        x = after[2](x + block.mlp(before[2](x)))
    return layers, decoder.logits(decoder.norm(x))


def show_tokens(page: Page, tokenizer: Tokenizer, text: str) -> None:
    """A model reads numbers: text is cut into pieces of a fixed vocabulary, each with the space
    before it, written _ here. Byte-pair encoding (bpe) merges the commonest neighbours until the
    vocabulary is full; unigram starts with many pieces and drops the least useful; to a word
    vocabulary, all other words are <unk>. The scenes' captions tell of coloured shapes: other words
    fall to pieces. A Chinese character is three bytes in UTF-8, and three tokens to a vocabulary
    that never met it; to the last one here, it is one."""
    page.section("From text to tokens", show_tokens.__doc__)
    captions = [caption for record in scenes("train", count=500) for caption in record.captions]
    kinds = {"the model's own": tokenizer}
    for kind in ("bpe", "unigram", "word"):
        kinds[f"{kind}, scenes"] = Tokenizer.train(captions, kind=kind, vocab_size=400)
    kinds["bpe, and Chinese"] = Tokenizer.train([*captions, *[CHINESE] * 50], vocab_size=400)
    for sentence in (text, CHINESE):
        page.text(f'"{sentence}": {len(sentence)} characters, {len(sentence.encode())} bytes')
        rows = [(n, len(p := kind.pieces(kind.encode(sentence))), p) for n, kind in kinds.items()]
        page.table(["vocabulary", "tokens", "pieces"], rows)


def show_self_attention(page: Page, start: Tensor, steps: Steps, x: Tensor, word: dict) -> None:
    """Three matrices turn each vector into a query (what do I look for?), a key (what do I offer?)
    and a value (what do I hand over?), d_k numbers in each head. S, a row's query times a column's
    key, tells how well they suit; over sqrt(d_k), it does not grow with d_k. What comes later is
    not written yet: minus infinity. The softmax makes a row positive, with sum 1: the weights of a
    sum of the values. W_o mixes the heads, and what was there is added, the residual."""
    page.section("Self-attention: a word looks at those before it", show_self_attention.__doc__)
    size, names = steps.query.size(-1), word["rows"]
    head = int(steps.weights[0, :, -1].amax(-1).argmin())  # the last word looks at several there
    for name, m, columns, note in (
        ("X", start[0], (), f"what layer 1 reads; then head {head + 1}, d_k = {size}"),
        *((n, m[0, head], (), f"{n} = X W_{n.lower()}") for n, m in zip("QKV", steps)),
        ("S", steps.scores[0, head], names, "S = Q K^T"),
        ("S / sqrt(d_k)", steps.scaled[0, head], names, f"and masked; sqrt(d_k) = {size**0.5:.2f}"),
        ("A", steps.weights[0, head], names, "A = softmax of each row: who looks at whom"),
        ("A V", steps.summed[0, head], (), "of this head"),
        ("[A V, ...] W_o", steps.output[0], (), "of all heads"),
        ("x + [A V, ...] W_o", x[0], (), "the residual; normed before what comes next"),
    ):
        page.matrix(name, m, columns=columns, note=note, **word)


def show_cross_attention(page: Page, block, layer, memory: Tensor, word: dict, grid_size) -> None:
    """The same, but keys and values are those of the picture's patches, and all may be looked at.
    The score is a dot product over sqrt(d_k), or, additive, that of a small network, v . tanh(q +
    k), bounded without a scale: both are shown for the last word, patch by patch; one that was not
    trained means nothing (v is random). K and V: of the patch looked at most, counted by rows."""
    page.section("Cross-attention: a word looks at the picture", show_cross_attention.__doc__)
    attn, (x, between, steps) = block.cross_attn, layer
    head, patch = divmod(int(steps.weights[0, :, -1].argmax()), memory.size(1))
    page.matrix("Q", steps.query[0, head], note=f"of the words; head {head + 1}", **word)
    for name, m in zip("KV", steps[1:]):
        page.matrix(name, m[0, head, patch, None], [f"patch {patch + 1}"], here=0)
    rows, columns = ([str(i + 1) for i in range(side)] for side in grid_size)
    for score, kind in ATTENTIONS.items():
        other = kind(attn.query_dim, num_heads=attn.num_heads, num_kv_heads=attn.num_kv_heads)
        other.load_state_dict(attn.state_dict(), strict=False)
        found = attend(other, between, memory)
        note = score + (", as trained" if isinstance(attn, kind) else ", not trained for it")
        for name, m in zip(("S", "A"), found[4:6]):
            page.matrix(name, m[0, head, -1].unflatten(0, grid_size), rows, columns, note=note)
    page.matrix("A V", steps.summed[0, head], note="as trained", **word)
    page.matrix("x + [A V, ...] W_o", (x + steps.output)[0], note="of all heads", **word)


def show_cache(page: Page, captioner: Captioner, tokens: Tensor, features) -> None:
    """A caption is written token by token, and the keys and values of what stands do not change.
    Kept, a step computes those of one token; not kept, those of the whole text and of all patches
    again. N patches and T tokens take 2 (N + T) H_kv L d_k numbers, L layers of H_kv key/value
    heads; int8 takes a byte a number, and four for the scale of each d_k of them."""
    page.section("Writing with a cache of keys and values, and without", show_cache.__doc__)
    tokens = tokens.repeat(1, 32)[:, : min(32, captioner.config.max_len)]
    kept, anew = with_and_without(captioner, tokens, features)
    page.table(["cache", "operations", "bytes moved"], [("kept", *kept[1:]), ("none", *anew[1:])])
    page.text(f"{tokens.size(1)} tokens; logits {(kept[0] - anew[0]).abs().max():.0e} apart.")
    rows = sizes(captioner.config, tokens.size(1), features.tokens.size(1))
    page.table(["heads", "bytes", "measured", "formula"], rows)


def show_scale(page: Page) -> None:
    """The product of two random vectors of d_k numbers has variance d_k. Unscaled, scores grow with
    d_k until one weight is nearly 1 and the softmax passes no gradient on; over sqrt(d_k), nothing
    depends on d_k. Means of 500 queries with 16 keys each; the gradient is d softmax / d scores."""
    page.section("Why 1 / sqrt(d_k)?", show_scale.__doc__)
    rows = []
    for size in (8, 16, 32, 64, 128, 256, 512, 1024):
        query, key = torch.randn(500, size, 1), torch.randn(500, 16, size)
        rows.append([size])
        for scores in (key @ query, key @ query / size**0.5):
            a = scores.softmax(1)  # (500, 16, 1)
            slope = torch.diag_embed(a[..., 0]) - a @ a.mT  # (500, 16, 16)
            rows[-1] += [f"{x:.3f}" for x in (scores.var(), slope.norm(dim=(1, 2)).mean())]
    page.table(["d_k", "variance", "gradient", "variance, scaled", "gradient, scaled"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="a brown dog runs")
    parser.add_argument("image", nargs="?", default=scenes("test", count=1)[0].image)
    parser.add_argument("--model", default="flickr8k-small", help="model folder, or a model's name")
    parser.add_argument("--html", help="also write a page with drawings of the matrices here")
    args = parser.parse_args()
    torch.manual_seed(0)
    page = Page(f'Attention, step by step: "{args.text}"')
    captioner = Captioner.from_pretrained(args.model)
    tokenizer, decoder = captioner.tokenizer, captioner.decoder
    page.picture(contact_sheet([captioner.explain(args.image, args.text)]), "the words' regions")
    ids = [tokenizer.bos_id, *tokenizer.encode(args.text)]
    tokens, word = torch.tensor([ids]), {"rows": tokenizer.pieces(ids), "here": len(ids) - 1}
    features = captioner.encode(captioner.preprocess(open_image(args.image))[0][None])
    memory = captioner.memory(features)
    show_tokens(page, tokenizer, args.text)
    page.section("From tokens to ids to vectors", f"Rows {ids} of a table; a place adds a vector.")
    page.matrix("embeddings", decoder.embed(tokens)[0], **word)
    layers, logits = by_hand(captioner, tokens, memory)
    show_self_attention(page, *layers[0][:3], word)
    show_cross_attention(page, decoder.blocks[0], layers[0][2:], memory, word, features.grid_size)
    expected, weights = captioner.decode(tokens, features, need_weights=True)
    maps = torch.stack([seen.weights for *_, seen in layers], dim=1)  # (1, L, H, T, N)
    page.section("The check", f"All {len(layers)} layers written out, and the package's own pass:")
    far = [f"{(a - b).abs().max():.0e}" for a, b in ((logits, expected), (maps, weights))]
    likeliest = " ".join(tokenizer.pieces(expected[0, -1].topk(5).indices.tolist()))
    page.table(["logits apart", "weights apart", "likeliest next"], [[*far, likeliest]])
    show_cache(page, captioner, tokens, features)
    show_scale(page)
    if args.html:
        page.save(args.html)


if __name__ == "__main__":
    torch.no_grad()(main)()
