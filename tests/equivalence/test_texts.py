"""Generated texts: their lengths, their form, and that they are always the same."""

from __future__ import annotations

import pytest
import torch

from labutils.data.texts import (
    LONG,
    LONGEST,
    SHORT,
    Chat,
    Text,
    expected_longest,
    from_hub,
    token_lengths,
)
from labutils.data.tokenizers import CHAT_FORMS, chat_tokenizer


@pytest.fixture(params=CHAT_FORMS, scope="module")
def tokenizer(request):
    return chat_tokenizer(request.param, 1024)


@pytest.mark.parametrize(("kind", "mean"), [(SHORT, 117), (LONG, 861)])
@pytest.mark.parametrize("count", [32, 1000])
@pytest.mark.parametrize("shorter", [1, 4])
def test_lengths_have_the_articles_mean(kind, mean, count, shorter):
    lengths = token_lengths(kind, count, shorter)
    assert sum(lengths) / count == pytest.approx(mean / shorter, rel=0.005)
    assert max(lengths) <= LONGEST / shorter
    assert len(set(lengths)) > min(16, count / 4)
    assert (max(lengths) == LONGEST / shorter) == (kind is LONG)


def test_a_batch_is_padded_to_what_drawn_batches_are():
    assert expected_longest(SHORT, 1) == pytest.approx(117, abs=1)
    lengths = torch.tensor(token_lengths(LONG, 1000))
    drawn = lengths[torch.randint(1000, (20_000, 4), generator=torch.Generator().manual_seed(0))]
    assert expected_longest(LONG, 4) == pytest.approx(
        drawn.max(1).values.float().mean().item(), rel=0.01
    )


def test_a_whole_conversation_is_the_templates(tokenizer):
    """Put together from parts, the ids are those of the whole text."""
    text = Text("浅間駅について説明してください。", "It was opened in 1923.")
    ids, asked = Chat(tokenizer).conversation(text, 200)
    turns = [
        {"role": "user", "content": text.prompt},
        {"role": "assistant", "content": text.answer},
    ]
    assert ids.tolist() == tokenizer.apply_chat_template(turns, return_dict=False)
    assert tokenizer.decode(ids[asked:]).startswith(text.answer)


@pytest.mark.parametrize("stretched", ["prompt", "answer"])
def test_what_is_too_long_keeps_its_form(tokenizer, stretched):
    chat = Chat(tokenizer)
    ids, asked = chat.conversation(Text("駅" * 300, "城" * 300), 60, stretched)
    assert len(ids) == 60
    assert ids.tolist()[: len(chat.before)] == chat.before
    assert ids.tolist()[-len(chat.after) :] == chat.after
    assert len(chat.before) < asked < 60 - len(chat.after)
    with pytest.raises(ValueError, match="chat form"):
        chat.generated(SHORT, 3, shorter=40)


def test_real_rows_become_texts(tmp_path, monkeypatch):
    """The article's body without its first sentence; instruction and input as one prompt."""
    import datasets

    row = {"instruction": "訳せ", "input": "station", "output": "駅"}
    row |= {"title": "駅", "text": "駅とは場所である。列車が止まる。", "url": ""}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row])
    )
    assert from_hub(SHORT, 1, tmp_path) == [Text("訳せ\nstation", "駅")]
    assert from_hub(LONG, 1, tmp_path) == [Text("列車が止まる。", "駅")]
