"""A BERT from a config; batches are BatchEncodings from a collate function; the model computes its loss."""

import random

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import vivace

PAD = 0


def sentences(count):
    rng = random.Random(7)
    out = []
    for _ in range(count):
        words = [rng.randrange(1, 100) for _ in range(rng.randrange(6, 20))]
        out.append({"words": words, "label": int(sum(words) > 50 * len(words))})
    return out


def collate(rows):
    longest = max(len(row["words"]) for row in rows)
    padded = torch.tensor([row["words"] + [PAD] * (longest - len(row["words"])) for row in rows])
    return BatchEncoding(
        {
            "input_ids": padded,
            "attention_mask": (padded != PAD).long(),
            "labels": torch.tensor([row["label"] for row in rows]),
        }
    )


def model():
    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(config)


def make():
    return vivace.Job(
        model=model,
        data=lambda: DataLoader(sentences(128), batch_size=16, shuffle=True, collate_fn=collate),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-4),
        epochs=3,
    )
