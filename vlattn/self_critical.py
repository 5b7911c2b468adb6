"""Self-critical training: captions that the model draws are rewarded by their CIDEr-D.

Rennie et al., "Self-critical Sequence Training for Image Captioning", CVPR 2017; the baseline of a
caption is the mean reward of the other captions drawn of its picture (Luo, "A Better Variant of
Self-Critical Sequence Training", 2020).

B pictures, K real tokens of a batch, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vlattn.captioner import Captioner
from vlattn.data.dataset import Batch, CaptionDataset, pack
from vlattn.metrics import CiderD, tokenize

# Of the model's distribution that captions are drawn from, and that learns. Label smoothing gives a
# tenth of it to words that do not fit: drawn as it is, most captions hold one of them.
TEMPERATURE = 0.6
END = "<end>"  # a word of its own: a caption that stops short of its end has no n-gram with it


class SelfCritical:
    """Draws captions, and weighs each by how much better than its siblings it is.

    Args:
        data: the training pictures; document frequencies are those of their captions.
        num_samples: captions drawn per picture, at least 2.
        max_len: most tokens of a drawn caption.
    """

    def __init__(self, data: CaptionDataset, *, num_samples: int = 5, max_len: int = 25):
        self.num_samples, self.max_len = num_samples, max_len
        self.reward = CiderD(
            {
                index: [[*tokenize(caption), END] for caption in record.captions]
                for index, record in enumerate(data.records)
            }
        )

    def draw(
        self, captioner: Captioner, batch: Batch, generator: torch.Generator
    ) -> tuple[Batch, Tensor, float]:
        """The batch with captions that the model drew in place of the written ones.

        Returns:
            the batch, the advantage of each of its K target tokens (K,), and the mean reward.
        """
        tokenizer = captioner.tokenizer
        with torch.no_grad():
            features = captioner.features(batch.images)
        drawn = captioner.generate(
            features,
            temperature=TEMPERATURE,
            num_samples=self.num_samples,
            max_len=self.max_len,
            generator=generator,
        )
        rewards = torch.tensor(
            [
                [
                    self.reward(
                        index, tokenize(tokenizer.decode(text.tokens)) + [END] * text.finished
                    )
                    for text in texts
                ]
                for index, texts in zip(batch.indices, drawn)
            ]
        )  # (B, num_samples)
        others = (rewards.sum(1, keepdim=True) - rewards) / (self.num_samples - 1)
        advantages = (rewards - others).flatten().tolist()
        captions = [
            [
                [tokenizer.bos_id, *text.tokens] + [tokenizer.eos_id] * text.finished
                for text in texts
            ]
            for texts in drawn
        ]
        packed, targets = pack(captions)
        lengths = [len(caption) - 1 for texts in captions for caption in texts]
        weights = torch.tensor(advantages).repeat_interleave(torch.tensor(lengths))
        batch = batch._replace(packed=packed, targets=targets)
        return batch, weights, float(rewards.mean())


def policy_loss(logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE, summed over the K tokens: logits (K, V), targets and advantages (K,)."""
    surprise = F.cross_entropy(logits.float() / TEMPERATURE, targets, reduction="none")
    return (advantages * surprise).sum()
