"""Image models: a ViT, or a ResNet with its batch norms (their running averages are buffers and stay with the model).

Run it:  python examples/vision.py [--model vit|resnet]        (needs the package transformers)
"""

import argparse

import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

import unwall


def build(name: str) -> torch.nn.Module:
    if name == "vit":
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
        return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes))
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=4)
    )


def bright_quarters(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with one bright quarter: which one is the label."""
    images, labels = 0.3 * torch.randn(count, 3, 32, 32), torch.randint(4, (count,))
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 2.0
    return images, labels


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", choices=["vit", "resnet"], default="resnet")
    asked = arguments.parse_args()

    torch.manual_seed(0)
    model = build(asked.model)
    unwall.shard(model, unwall.Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=2e-3)
    device = next(model.parameters()).device
    for step in range(25 if asked.model == "resnet" else 90):  # the ViT needs a while before it looks at all
        images, labels = bright_quarters(32)
        loss = model(pixel_values=images.to(device), labels=labels.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    model.eval()
    images, labels = bright_quarters(200)
    with torch.no_grad():
        right = (model(pixel_values=images.to(device)).logits.argmax(-1).cpu() == labels).float().mean()
    print(f"{asked.model}: {right:.0%} of new images")


if __name__ == "__main__":
    main()
