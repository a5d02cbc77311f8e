"""Three kinds of tokenizer and template, made on the spot, each with its ways of hiding where a text went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from model_fixtures import save_tiny_tokenizer

ROOT = Path(__file__).parent.parent.parent
AGENT = ROOT / "examples" / "agent"
SPECIAL = ["<unk>", "<s>", "</s>"]

# Trims, and folds the system prompt into the first user message, as Llama 2's does.
FOLDING = (
    "{% set ns = namespace(system='') %}{{ bos_token }}"
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.system = ns.system + '<<SYS>>\n' + message.content | trim + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}[INST] {{ ns.system }}{% if ns.system and tools %}"
    "{% for tool in tools %}{{ tool | tojson(indent=2) }}\n{% endfor %}{% endif %}"
    "{% set ns.system = '' %}{{ message.content | trim }} [/INST]"
    "{% else %} {{ message.role }} {{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    " </s>"
    "{% endif %}{% endfor %}"
)

# Keeps reasoning of the last turn alone, and takes it out of older ones, as Qwen 3's does.
THINKING = (
    "{% if tools %}<s>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</s>\n{% endif %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<s>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}{{ content }}"
    "{% for call in message.tool_calls or [] %}\n<call>{{ call.function | tojson }}</call>{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def corpus() -> list[str]:
    texts = [(AGENT / name).read_text() for name in ("system.md", "handbook.md", "tools.json")]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def byte_level(folder: Path) -> Path:
    """Byte-level BPE with ChatML, as SmolLM2 has; tools behind the first message."""
    return save_tiny_tokenizer(folder)


def byte_fallback(folder: Path) -> Path:
    """BPE over characters, of unknown ones over bytes, with a beginning-of-text token before plain texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    first = Tokenizer(models.BPE(unk_token="<unk>"))
    trained = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=trained, show_progress=False)
    # Without a pre-tokenizer merges may go over words; trained on words they stay short.
    first.train_from_iterator((f"\u2581{word}" for line in corpus()[:80] for word in line.split()), trainer)
    model = json.loads(first.to_str())["model"]  # made anew, or bytes would be special tokens
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _save(folder, tokenizer, FOLDING)


def unigram(folder: Path) -> Path:
    """Unigram with Metaspace, as SentencePiece writes it; a character that it does not know is bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    first = Tokenizer(models.Unigram())
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    first.train_from_iterator(
        corpus(), trainers.UnigramTrainer(vocab_size=900, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    vocabulary = json.loads(first.to_str())["model"]["vocab"]
    vocabulary += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram([(text, score) for text, score in vocabulary], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return _save(folder, tokenizer, THINKING)


FAMILIES: dict[str, Callable[[Path], Path]] = {"byte-level": byte_level, "byte-fallback": byte_fallback, "unigram": unigram}


def _save(folder: Path, tokenizer: object, template: str) -> Path:
    from tokenizers import AddedToken, Tokenizer, processors

    assert isinstance(tokenizer, Tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder
