"""The shipped digits by the features of a small classifier: ancestral against its own rule.

python benchmarks/digits_features.py [--count 500] [--steps 64]

A small convolutional net learns the real training digits; its 32 penultimate features and its
probabilities stand in for Inception's. The reference is the training digits. Held-out digits
are measured in the same way: that is as good as real. The Fréchet distance falls with the
number of images, so it is also given for no more samples than there are held-out digits.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psidiff
from psidiff.data.images import digits
from psidiff.evaluation.image_metrics import image_batches, image_metrics, image_statistics
from psidiff.evaluation.inception import Classifier
from psidiff.evaluation.metric_result import mean_of


class DigitNet(nn.Module):
    """uint8 images (N, 1, 8, 8) -> features (N, 32) and probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 16, 32),
            nn.Tanh(),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images.float() / 255)
        return features, self.head(features).softmax(-1)


def trained(images: Tensor, labels: Tensor, epochs: int) -> DigitNet:
    torch.manual_seed(0)
    net = DigitNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(50):
            aside = int(torch.randint(-1, 2, ()))
            probabilities = net(images[rows].roll(aside, 3))[1]  # still the same digit
            loss = F.nll_loss(probabilities.log(), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digits", default="digits")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    model = psidiff.load(options.digits, device="cpu")
    real = {}
    for split in ("train", "valid"):
        tokens, labels, *_ = digits(split).rows(torch.arange(len(digits(split))))
        shown = [model.codec.decode(row) for row in tokens]  # 0 to 255, as samples are
        real[split] = torch.cat(list(image_batches(shown))), labels
    net = trained(*real["train"], options.epochs)
    features = Classifier(net, "digit net")

    def right(images: Tensor, labels: Tensor) -> str:
        read = features(images)[1].argmax(-1) == labels
        return str(mean_of("read as their label", read.double().tolist()))

    reference = image_statistics([real["train"][0]], features, "digits, train")
    images, labels = real["valid"]
    rows = {f"real, held out, {len(images)}": real["valid"]}
    wanted = torch.arange(options.count) % 10
    for rule in ("ancestral", model.config.recommended_kappa):
        made = model.sample(options.count, options.steps, rule, labels=wanted)
        samples = torch.cat(list(image_batches(made.images)))
        rows[f"{rule}, {options.count}"] = samples, wanted
        rows[f"{rule}, {len(images)}"] = samples[: len(images)], wanted[: len(images)]
    print(f"{options.steps} steps, reference: the {len(real['train'][0])} training digits")
    for name, (images, labels) in rows.items():
        measures = image_metrics([images], reference, features)
        print(f"{name}: {right(images, labels)}; {'; '.join(map(str, measures))}")


if __name__ == "__main__":
    main()
