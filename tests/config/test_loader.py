import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from config.address import Address
from config.loader import DEFAULT_FILE, ConfigFileError, default_text, load
from config.settings import PARTITIONS_PER_TOPIC_MAX, Settings, TopicSettings
from config.yaml_tree import DEPTH_MAX, FILE_BYTES_MAX, YamlProblemError, read_tree


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "varve.yaml"


def problems(file: Path, text: str, **overrides: object) -> list[tuple[int, str, str]]:
    """(line, key, reason) of everything that is wrong with a text."""
    file.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        load(str(file), overrides)
    results = caught.value.problems
    for problem in results:
        assert problem.file in (str(file), "command line")
        assert str(problem) in str(caught.value)
    return [(problem.line, problem.key, problem.reason) for problem in results]


@pytest.mark.parametrize(
    "text",
    [
        "sasl: {users: hunter2}",
        "sasl: {users: [hunter2]}",
        "sasl: {users: {alice: hunter2}}",
        "sasl: {users: {alice: {password: hunter2}}}",
        "sasl: {users: {alice: {file: [hunter2]}}}",
        "sasl: {password: hunter2}",
        "tls: {key_password: hunter2}",
    ],
)
def test_an_error_does_not_show_a_secret(file: Path, text: str) -> None:
    ((line, key, reason),) = problems(file, text)
    assert line == 1
    assert "hunter2" not in key + reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sasl: {mechanisms: [OAUTHBEARER]}", "needs either"),
        ("sasl: {mechanisms: [OAUTHBEARER], oauthbearer: {jwks_file: f}}", "audience"),
        ("sasl: {mechanisms: [GSSAPI]}", "expected 'PLAIN'"),
        ("sasl: {oauthbearer: {jwks_url: 'http://issuer.example/keys'}}", "pattern"),
        ('listeners: ["SASL_SSL://127.0.0.1:1"]', "needs tls.certificate_file"),
        (
            'sasl: {mechanisms: [PLAIN]}\nlisteners: ["SASL_PLAINTEXT://0.0.0.0:1"]',
            "PLAIN sends secrets without encryption",
        ),
        ('listeners: ["GSSAPI://127.0.0.1:1"]', "GSSAPI:// is not supported"),
    ],
)
def test_settings_of_sasl_are_checked(file: Path, text: str, reason: str) -> None:
    ((_, _, problem),) = problems(file, text)
    assert reason in problem


def test_a_listener_with_sasl_may_be_reached_from_other_machines(file: Path) -> None:
    file.write_text('listeners: ["SASL_PLAINTEXT://0.0.0.0:1"]')
    (listener,) = load(str(file)).listeners
    assert (listener.uses_sasl, listener.uses_tls) == (True, False)


def test_the_default_file_is_the_defaults_of_the_models() -> None:
    assert load(None) == Settings()


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += leaves(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def test_the_default_file_holds_every_key() -> None:
    tree = read_tree(default_text())
    present = {".".join(str(part) for part in path) for path in tree.lines}
    # Topic keys stand beside `partitions` in the file, under `keys` in the model.
    assert [
        name for name in leaves(Settings) if name not in present | {"topic_defaults.keys"}
    ] == []


def test_the_examples_in_the_default_file_can_be_used(file: Path) -> None:
    examples = re.findall(r"^#   (\w+: \{.*\})$", default_text(), re.MULTILINE)
    assert len(examples) == 2
    file.write_text("topics:\n" + "".join(f"  {line}\n" for line in examples))
    settings = load(str(file))
    assert settings.partitions("orders") == 3
    assert settings.topic_config("audit").cleanup_policy == ("compact", "delete")


def test_the_example_of_the_introduction_is_understood(file: Path) -> None:
    file.write_text("""
log_dirs: [./data]
cleaner: {workers: 1, dedupe_buffer_bytes: 128MiB, read_bytes_per_second: 100MiB,
          write_bytes_per_second: 100MiB, backoff_ms: 1000}
topic_defaults: {partitions: 1, cleanup.policy: delete, retention.ms: 604800000}
topics:
  orders: {partitions: 3, cleanup.policy: compact, min.cleanable.dirty.ratio: 0.3}
  audit:  {cleanup.policy: "compact,delete", retention.ms: 86400000}
""")
    settings = load(str(file))
    assert settings.cleaner.read_bytes_per_second == 100 << 20
    assert settings.cleaner.dedupe_buffer_bytes == 128 << 20
    assert settings.partitions("orders") == 3
    assert settings.partitions("audit") == settings.partitions("another") == 1
    assert settings.topic_config("orders").min_cleanable_dirty_ratio == 0.3
    assert settings.topic_config("orders").retention_ms == 604_800_000
    assert settings.topic_config("audit").retention_ms == 86_400_000
    assert settings.topic_config("another").cleanup_policy == ("delete",)


def test_flags_win_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    file.write_text("http: 127.0.0.1:1\nlisteners: [127.0.0.1:2]\nlog_dirs: [a]\n")
    settings = load(str(file), {"listeners": ["127.0.0.1:3"], "log_dirs": ["b", "c"]})
    assert settings.http == Address("127.0.0.1", 1)
    assert settings.listeners[0].address == Address("127.0.0.1", 3)
    assert settings.log_dirs == ("b", "c")
    assert settings.auto_create_topics


def test_the_number_of_partitions_is_suggested_like_a_topic_config(file: Path) -> None:
    ((_, key, reason),) = problems(file, "topics:\n  orders: {partition: 3}\n")
    assert (key, reason) == (
        "topics.orders.partition",
        "unknown setting; did you mean partitions?",
    )


def test_a_flag_hides_what_is_wrong_with_the_key_of_the_file(file: Path) -> None:
    file.write_text("http: nonsense\n")
    assert load(str(file), {"http": "127.0.0.1:1"}).http == Address("127.0.0.1", 1)


def test_a_bad_flag_is_named_as_the_flag(file: Path) -> None:
    results = problems(file, "", listeners=["nonsense"])
    assert results == [(0, "--listen", "expected HOST:PORT, not 'nonsense'")]
    results = problems(file, "", http="0.0.0.0:9644")
    assert [(line, key) for line, key, _ in results] == [(0, "--http")]


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "cleaner:\n", "topics:\n", "topics: {a: }"]
)
def test_a_file_that_says_nothing_is_the_defaults(file: Path, text: str) -> None:
    file.write_text(text)
    assert load(str(file)).cleaner == Settings().cleaner


@pytest.mark.parametrize("key", ["listeners", "log_dirs", "limits", "http"])
def test_an_empty_section_leaves_the_default(file: Path, key: str) -> None:
    file.write_text(f"{key}:\n")
    assert load(str(file)) == Settings()


def test_everything_that_is_wrong_is_named_at_once_with_line_and_key(file: Path) -> None:
    results = problems(
        file,
        """\
listeners: ["127.0.0.1:9092", 5]
cleaner:
  workers: two
  backof_ms: 3
topics:
  orders:
    partitions: 3
    cleanup.policy: compakt
    foo.bar: 1
  no: {partitions: 0}
htp: 3
logging: {level: loud}
allow_insecure: yes
""",
    )
    assert [(line, key) for line, key, _ in results] == [
        (1, "listeners[1]"),
        (3, "cleaner.workers"),
        (4, "cleaner.backof_ms"),
        (8, "topics.orders.cleanup.policy"),
        (9, "topics.orders.foo.bar"),
        (10, "topics.no.partitions"),
        (11, "htp"),
        (12, "logging.level"),
        (13, "allow_insecure"),
    ]
    reasons = [reason for _, _, reason in results]
    assert reasons[1] == "expected a whole number, not 'two'"
    assert reasons[2] == "unknown setting; did you mean cleaner.backoff_ms?"
    assert reasons[6] == "unknown setting; did you mean http?"
    assert reasons[8] == "expected true or false, not 'yes'"


def test_contradictions_are_named_beside_invalid_values_of_other_keys(file: Path) -> None:
    results = problems(
        file,
        """\
htp: 3
http: 0.0.0.0:9644
listeners: ["SSL://127.0.0.1:9092"]
log_dirs: [a, a/b]
topics:
  typo: {foo.bar: 1}
  orders: {max.compaction.lag.ms: 1h, min.compaction.lag.ms: 2h}
""",
    )
    assert [(line, key) for line, key, _ in results] == [
        (1, "htp"),
        (2, "http"),
        (3, "listeners"),
        (4, "log_dirs"),
        (6, "topics.typo.foo.bar"),
        (7, "topics.orders.min.compaction.lag.ms"),
    ]


def test_an_invalid_value_causes_no_contradiction_with_its_default(file: Path) -> None:
    text = "tls: {certificat_file: a.pem}\nlisteners: ['SSL://127.0.0.1:9092']\nlog_dirs: [a, a]"
    results = [results[:2] for results in problems(file, text)]
    assert results == [(1, "tls.certificat_file"), (3, "log_dirs")]
    defaults = "topic_defaults: {min.compaction.lag.ms: 2h, max.compaction.lag.ms: 1h}\n"
    (only,) = problems(file, f"{defaults}topics: {{a: {{}}, b: {{}}}}")
    assert only[:2] == (1, "topic_defaults.min.compaction.lag.ms")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nhttp: 0.0.0.0:9644\n".replace("a: 1\n", "\n"), 2, "http"),
        ("listeners: ['192.168.1.1:9092']", 1, "listeners"),
        ("listeners: ['127.0.0.1:1', '127.0.0.1:1']", 1, "listeners"),
        ("listeners: ['127.0.0.1:9644']", 1, "listeners"),
        ("\nhttp: '127.0.0.1:9092'", 2, "http"),
        ("advertise: 0.0.0.0:9092", 1, "advertise"),
        ("advertise: example.org:0", 1, "advertise"),
        ("log_dirs: []", 1, "log_dirs"),
        ("log_dirs: ['']", 1, "log_dirs[0]"),
        ("log_dirs: [a, ./a]", 1, "log_dirs"),
        ("log_dirs: [a, a/b]", 1, "log_dirs"),
        ("log_dirs: data", 1, "log_dirs"),
        ("cleaner:\n  retry_backoff_ms: 2h", 2, "cleaner.retry_backoff_ms"),
        ("groups:\n  min_session_timeout_ms: 2h", 2, "groups.min_session_timeout_ms"),
        ("cleaner:\n  dedupe_buffer_bytes: 1KiB", 2, "cleaner.dedupe_buffer_bytes"),
        ("cleaner:\n  workers: 1.5", 2, "cleaner.workers"),
        ("cleaner:\n  workers: true", 2, "cleaner.workers"),
        ("cleaner: 3", 1, "cleaner"),
        ("topics: [orders]", 1, "topics"),
        ("topics:\n  orders: compact", 2, "topics.orders"),
        ("topics:\n  orders:\n    retention.ms:", 3, "topics.orders.retention.ms"),
        ("topics:\n  orders:\n    segment.bytes: 1KiB", 3, "topics.orders.segment.bytes"),
        ("topics:\n  orders.compacted: {}", 2, "topics.orders.compacted"),
        ("topics:\n  __consumer_offsets: {}", 2, "topics.__consumer_offsets"),
        ("topics:\n  a/b: {}", 2, "topics.a/b"),
        ("topics:\n  a.b: {}\n  a_b: {}", 3, "topics.a_b"),
        (
            "groups: {consumer_session_timeout_ms: 5s}",
            1,
            "groups.consumer_heartbeat_interval_ms",
        ),
        ("topics:\n  a: {partitions: 10000}\n  b: {}", 1, "topics"),
        ("topic_defaults:\n  max.message.bytes: 101MiB", 2, "topic_defaults.max.message.bytes"),
        (
            "topic_defaults:\n  remote.storage.enable: true",
            2,
            "topic_defaults.remote.storage.enable",
        ),
        (
            "topics:\n  a:\n    max.compaction.lag.ms: 1h\n    min.compaction.lag.ms: 2h",
            4,
            "topics.a.min.compaction.lag.ms",
        ),
        (
            "topic_defaults: {min.compaction.lag.ms: 2h}\ntopics:\n  a:\n"
            "    max.compaction.lag.ms: 1h",
            3,
            "topics.a.min.compaction.lag.ms",
        ),
    ],
)
def test_contradictions_are_refused_where_they_stand(
    file: Path, text: str, line: int, key: str
) -> None:
    assert [results[:2] for results in problems(file, text)] == [(line, key)]


def test_clients_without_credentials_are_accepted_only_on_request(file: Path) -> None:
    file.write_text("listeners: ['0.0.0.0:9092']\nhttp: '[::]:9644'\nallow_insecure: true\n")
    assert load(str(file)).listeners[0].address.is_wildcard
    reason = problems(file, "listeners: ['0.0.0.0:9092']")[0][2]
    assert "allow_insecure: true" in reason


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("http: 1\n\nhttp: 2\n", 3, "given twice, first on line 1"),
        ("cleaner: {workers: 1, workers: 2}", 1, "given twice"),
        ("a: &x [1]\nb: *x\n", 1, "anchors and aliases"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "tags are not supported"),
        ("a: !!int 3\n", 1, "tags are not supported"),
        ("a: 1\n---\nb: 2\n", 2, "more than one document"),
        ('log_dirs: ["/srv/a\\0b"]\n', 1, "contains a NUL character"),
        ("? [a]\n: 1\n", 1, "a key has to be text"),
        ("[" * 100_000, 1, "nested deeper"),
        ("a: " * (DEPTH_MAX + 1), 1, "mapping values are not allowed"),
        ("a: [1\n", 1, "did not find expected"),
        ("\ta: 1\n", 1, "indented with a tab"),
        ("a: 1\nb: \x07\n", 2, "character"),
        ("- 1\n", 1, "expected keys and values"),
        ("just text", 1, "expected keys and values"),
    ],
)
def test_yaml_that_is_no_settings_file_is_refused(
    file: Path, text: str, line: int, words: str
) -> None:
    results = problems(file, text)
    assert len(results) == 1
    assert results[0][0] == line
    assert words in results[0][2]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("log.retention.ms", "it is topic_defaults: {retention.ms: ...} here"),
        ("num.partitions", "docs/how-to/move-from-and-to-kafka.md has Kafka's names"),
    ],
)
def test_a_name_of_kafkas_properties_says_where_it_belongs(
    file: Path, name: str, hint: str
) -> None:
    assert problems(file, f"{name}: 1\n") == [(1, name, f"unknown setting; {hint}")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("broker.id=0\nlisteners=PLAINTEXT://:9092\n", 1),
        ("# Licensed to\n\n  ! a comment\nlog.dirs = /tmp/kafka\n# more\nnum.partitions=1\n", 4),
    ],
)
def test_kafkas_properties_are_recognized(file: Path, text: str, line: int) -> None:
    ((found_line, _, reason),) = problems(file, text)
    assert (found_line, reason[:60]) == (
        line, "this is not YAML, but KEY=VALUE as in Kafka's server.propert")  # fmt: skip


def test_a_value_that_should_be_a_list_is_shown_as_one(file: Path) -> None:
    assert problems(file, "listeners: 0.0.0.0:29195\nlog_dirs: /tmp/x\n") == [
        (1, "listeners", "expected a list such as [0.0.0.0:29195], not '0.0.0.0:29195'"),
        (2, "log_dirs", "expected a list such as [/tmp/x], not '/tmp/x'"),
    ]


def test_a_name_of_kafka_leads_to_the_setting_with_that_meaning(file: Path) -> None:
    page = "unknown setting; docs/how-to/move-from-and-to-kafka.md has Kafka's names"
    assert problems(file, "advertised.listeners: x\nlog.dirs: x\n") == [
        (1, "advertised.listeners", page),
        (2, "log.dirs", "unknown setting; did you mean log_dirs?"),
    ]
    assert problems(file, "cleaner: {log.cleaner.threads: 2}\n") == [
        (1, "cleaner.log.cleaner.threads", page)
    ]
    for key, text in (
        ("topic_defaults.log.retention.ms", "topic_defaults: {log.retention.ms: 1}\n"),
        ("topics.a.log.retention.ms", "topics: {a: {log.retention.ms: 1}}\n"),
    ):
        assert problems(file, text) == [(1, key, "unknown setting; did you mean retention.ms?")]


def test_the_name_of_an_option_names_the_setting(file: Path) -> None:
    assert problems(file, "data: /tmp/x\nlisten: h:1\n") == [
        (1, "data", "unknown setting; did you mean log_dirs?"),
        (2, "listen", "unknown setting; did you mean listeners?"),
    ]


def test_what_is_not_closed_is_reported_where_it_begins(file: Path) -> None:
    expected = "while parsing a flow mapping, did not find expected ',' or '}'"
    assert problems(file, "topics: {a: {\n  partitions: 1\n") == [(1, "", expected)]
    assert problems(file, "topics: {a: {}\nhttp: h:1\n") == [
        (2, "", f"{expected}; it begins on line 1")
    ]


def test_a_list_without_quotes_in_braces_names_the_quotes(file: Path) -> None:
    """In YAML, `{cleanup.policy: compact,delete}` has a key `delete`."""
    results = problems(file, "topics:\n  a: {cleanup.policy: compact,delete}\n")
    assert results == [(2, "topics.a.delete", 'write cleanup.policy: "compact,delete" with quotes')]


def test_control_characters_of_a_key_do_not_reach_the_terminal(file: Path) -> None:
    file.write_text('"\\e[2J": 1\n')
    with pytest.raises(ConfigFileError, match=r"\\x1b\[2J: unknown setting"):
        load(str(file))


def test_a_bomb_is_refused_before_it_is_built(file: Path) -> None:
    levels = "".join(f"a{n + 1}: &a{n + 1} [{','.join([f'*a{n}'] * 9)}]\n" for n in range(9))
    assert "anchors" in problems(file, "a0: &a0 x\n" + levels)[0][2]


@pytest.mark.parametrize("letter", ["#", "ö"])
def test_a_file_that_is_too_large_is_refused_and_not_cut(file: Path, letter: str) -> None:
    comment = "#" + letter * (FILE_BYTES_MAX // len(letter.encode()))
    file.write_text(f"{comment}\nallow_insecure: true\n")
    with pytest.raises(ConfigFileError, match="larger"):
        load(str(file))


def test_a_file_with_thousands_of_topics_is_checked_in_seconds() -> None:
    topics = {f"topic.{number}": TopicSettings() for number in range(10_000)}
    began = time.process_time()
    Settings(topics=topics)
    assert time.process_time() - began < 3.5  # 1.1 s; each with each would take 5.6 s


def test_a_file_that_cannot_be_read_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        load(str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigFileError, match="directory"):
        load(str(tmp_path))
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe4\n")
    with pytest.raises(ConfigFileError, match="latin:2: is not UTF-8"):
        load(str(tmp_path / "latin"))


def test_words_that_old_yaml_takes_for_booleans_are_text() -> None:
    tree = read_tree("no: on\n123: 0x10\nx: 1_000\ny: 2020-01-01\nz: 'true'\nw: True\nv: ~\n")
    assert tree.value == {
        "no": "on",
        "123": "0x10",
        "x": "1_000",
        "y": "2020-01-01",
        "z": "true",
        "w": True,
        "v": None,
    }


@given(
    st.text(
        alphabet=st.sampled_from(list("ab:{}[]-,'\"# \n\t&*!?|>%@0123.\x00\ufeff")), max_size=60
    )
)
def test_any_text_is_read_or_refused_with_a_line(text: str) -> None:
    try:
        lines = list(read_tree(text).lines.values())
    except YamlProblemError as error:
        lines = [error.line]
    assert all(1 <= line <= text.count("\n") + 2 for line in lines)


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.floats()


@given(
    st.dictionaries(
        st.sampled_from([*Settings.model_fields, "other"]),
        plain
        | st.lists(plain, max_size=3)
        | st.dictionaries(st.text(max_size=8), plain, max_size=3),
        max_size=4,
    )
)
def test_any_values_are_taken_or_refused_by_key(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True))
    reasons = ["taken"]
    try:
        load(str(file))
    except ConfigFileError as error:
        reasons = [problem.reason for problem in error.problems]
    assert reasons
    assert all(reasons)


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.http = Address("127.0.0.1", 1)


def test_the_partitions_of_one_topic_are_bounded(file: Path) -> None:
    results = problems(file, f"topics: {{a: {{partitions: {PARTITIONS_PER_TOPIC_MAX + 1}}}}}")
    assert results[0][1] == "topics.a.partitions"


def test_the_default_file_is_called_by_its_name() -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(None, {"log_dirs": ["a"], "unknown": 1})
    assert [(p.file, p.key) for p in caught.value.problems] == [("command line", "unknown")]
    assert (Path(__file__).parents[2] / DEFAULT_FILE).read_text() == default_text()
