"""The settings file as a table: every key is there, and its help is that of default.yaml."""

import yaml

from config.loader import default_text
from config.settings import Settings
from config.settings_table import LEFT_OUT, file_settings, help_texts


def keys_of(section: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for name, value in section.items():
        if isinstance(value, dict) and value:
            keys += keys_of(value, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def test_the_table_has_the_keys_of_the_default_file() -> None:
    written = [
        key
        for key in keys_of(yaml.safe_load(default_text()))
        if key.partition(".")[0] not in LEFT_OUT
    ]
    assert sorted(row.name for row in file_settings(Settings())) == sorted(written)


def test_a_key_has_the_comment_above_it_as_its_help() -> None:
    texts = help_texts()
    assert texts["cleaner.workers"].startswith("Number of worker processes.")
    assert texts["tls.key_file"] == "The private key in PEM, if it is not in certificate_file."
    assert "cleaner.enabled" not in texts  # nothing is above it


def test_a_value_that_differs_is_beside_its_default() -> None:
    settings = Settings.model_validate({"cleaner": {"workers": 3}, "advertise": "kafka.lan:9"})
    rows = {row.name: row for row in file_settings(settings)}
    assert (rows["cleaner.workers"].value, rows["cleaner.workers"].default) == ("3", "1")
    assert (rows["advertise"].value, rows["advertise"].default) == ("kafka.lan:9", "null")
    assert [row.name for row in rows.values() if row.value != row.default] == [
        "advertise",
        "cleaner.workers",
    ]
