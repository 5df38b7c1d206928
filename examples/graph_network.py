"""A graph network: messages along edges, with a large table of node embeddings that lives on the host.

Run it:  python examples/graph_network.py
"""

import torch
from torch import nn

import unwall

NODES, EDGES, CLASSES = 400, 2000, 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        messages = self.others(nodes)[source]
        heard = torch.zeros_like(nodes, dtype=messages.dtype).index_add(0, target, messages)
        counts = torch.bincount(target, minlength=len(nodes)).clamp(min=1).to(heard.dtype)
        return torch.relu(self.own(nodes) + heard / counts[:, None])


class GraphNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.nodes = nn.Embedding(NODES, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nodes = self.nodes(ids)
        for layer in self.layers:
            nodes = layer(nodes, source, target)
        return self.head(nodes)


def main() -> None:
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (NODES,))
    source = torch.randint(NODES, (EDGES,))
    same = torch.stack([torch.randperm(NODES) for _ in range(EDGES)])  # nodes of one class know each other
    target = same[torch.arange(EDGES), (labels[same] == labels[source][:, None]).float().argmax(1)]

    model = GraphNet()
    unwall.shard(model, unwall.Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    ids, source, target, labels = (tensor.to(device) for tensor in (torch.arange(NODES), source, target, labels))
    for step in range(20):
        loss = nn.functional.cross_entropy(model(ids, source, target).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
