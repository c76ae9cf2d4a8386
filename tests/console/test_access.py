"""The page of users and access control lists, on a broker that has them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from playwright.sync_api import Page, expect

from tests.support.console import confirm, cramped_dialogs, open_page, row_with
from tests.support.varve import VarveBroker, running_varve

SETTINGS = {"authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]}}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("guarded"), SETTINGS) as broker:
        yield broker


def test_a_user_is_created_gets_a_password_and_is_deleted(page: Page, guarded: VarveBroker) -> None:
    open_page(page, guarded, "access")
    expect(page.get_by_text("No users yet")).to_be_visible()
    page.get_by_role("button", name="Create user").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("User").fill("ada")
    dialog.get_by_label("Password").fill("correct horse")
    confirm(page, "Create user")
    row = row_with(page, "ada")
    expect(row).to_contain_text("SCRAM-SHA-512")
    page.get_by_role("button", name="Change the password of ada").click()
    dialog.get_by_label("Password").fill("battery staple")
    dialog.get_by_label("Mechanism").select_option("SCRAM-SHA-256")
    confirm(page, "Password")
    expect(row).to_contain_text("SCRAM-SHA-256")
    page.get_by_role("button", name="Delete ada").click()
    confirm(page, "Delete")
    expect(page.get_by_text("No users yet")).to_be_visible()
    assert json.loads(guarded.get("/api/v1/users"))["users"] == []


def test_an_entry_is_added_found_and_removed(page: Page, guarded: VarveBroker) -> None:
    open_page(page, guarded, "access")
    page.get_by_role("button", name="Add entry").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Principal").fill("ada")
    dialog.get_by_label("Type of resource").select_option("group")
    dialog.get_by_label("Names").select_option("prefixed")
    dialog.get_by_label(re.compile(r"^Name\s")).fill("team-")
    dialog.get_by_role("button", name="Add entry").click()
    expect(dialog.get_by_role("alert")).to_contain_text(re.compile("principal", re.IGNORECASE))
    dialog.get_by_label("Principal").fill("User:ada")
    dialog.get_by_role("button", name="Add entry").click()
    row = row_with(page, "User:ada")
    expect(row).to_contain_text("group team-* by prefix")
    assert cramped_dialogs(page) == []
    (entry,) = json.loads(guarded.get("/api/v1/acls"))["acls"]
    assert (entry["operation"], entry["pattern_type"]) == ("read", "prefixed")
    page.get_by_label("Principal or name contains").fill("nobody")
    expect(page.get_by_text("None of the acls matches")).to_be_visible()
    page.get_by_label("Principal or name contains").fill("team")
    page.get_by_role("button", name="Remove allow User:ada").click()
    confirm(page, "Remove")
    expect(row).to_have_count(0)
    assert json.loads(guarded.get("/api/v1/acls"))["acls"] == []


def test_a_broker_without_access_control_says_so_calmly_and_offers_no_entries(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "access")
    expect(page.get_by_text("Access control is off")).to_contain_text("authorization.enabled")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Add entry")).to_have_count(0)


def sign_in(page: Page, user: str, secret: str) -> None:
    page.get_by_label("User", exact=True).last.fill(user)
    page.get_by_label("Password").fill(secret)
    page.get_by_role("button", name="Sign in").click()


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[VarveBroker]:
    """A broker with the topics `orders` and `prices`; the user ada may read `orders`."""
    (tmp_path / "password").write_text("correct horse")
    users = {"ada": {"file": str(tmp_path / "password")}}
    settings = SETTINGS | {"http_users": True, "sasl": {"users": users}}
    with running_varve(tmp_path / "varve", settings) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        view = {"cleanup.policy": "compact", "varve.view": "compacted"}
        new = [NewTopic("orders", 2, 1, config=view), NewTopic("prices", 1, 1)]
        entry = AclBinding(
            ResourceType.TOPIC, "orders", ResourcePatternType.LITERAL, "User:ada", "*",
            AclOperation.READ, AclPermissionType.ALLOW,
        )  # fmt: skip
        for future in (*admin.create_topics(new).values(), *admin.create_acls([entry]).values()):
            future.result(30)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("orders", b"a chair", b"ada", partition=0)
        assert producer.flush(30) == 0
        yield broker


def test_who_may_read_a_topic_sees_its_pages_and_which_permission_others_need(
    page: Page, owned: VarveBroker
) -> None:
    page.goto(f"{owned.url}/#/topics")
    sign_in(page, "ada", "correct horse")
    expect(page.get_by_role("link", name="orders", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="prices")).to_have_count(0)
    for path, shown in {
        "topics/orders": page.get_by_role("region", name="Partitions of orders"),
        "topics/orders/0": page.locator(".strata canvas"),
        "topics/orders/messages": row_with(page, "a chair"),
        "topics/orders/erasures": page.get_by_text("No key was erased"),
        "topics/orders.compacted": page.get_by_role("region", name="Compacted views"),
        "topics/orders.compacted/messages": row_with(page, "a chair"),
    }.items():
        open_page(page, owned, path)
        expect(shown).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    for path, reason in {
        "topics/prices": "User:ada needs DESCRIBE on topic prices or the cluster",
        "": "User:ada needs DESCRIBE on the cluster",
    }.items():
        open_page(page, owned, path)
        expect(page.get_by_role("alert")).to_contain_text(reason)
    open_page(page, owned, "topics")
    page.get_by_role("link", name="Metrics").click()
    expect(page.get_by_role("alert")).to_have_text("User:ada needs DESCRIBE on the cluster")
