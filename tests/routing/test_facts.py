"""What says that two leads are one person or one household."""

from __future__ import annotations

from uuid import UUID

import pytest

from routing.facts import identities, normal_address, world_phone
from routing.model import Lead

TENANT = UUID(int=7)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("12 Oak Street", "78701"), ("12 OAK ST.", "78701-4321")),
        (("12 North Oak Avenue Apt 3", "78701"), ("12 n oak ave, #3", "78701")),
        (("Hauptstraße 5", "10115"), ("HAUPTSTRASSE 5", "10115")),
        (("5 Rue de l'Église", "K1A 0B1"), ("5 rue de l'eglise", "k1a0b1")),
    ],
)  # fmt: skip
def test_addresses_that_are_one(one: tuple[str, str], two: tuple[str, str]) -> None:
    assert normal_address(*one) == normal_address(*two) is not None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("12 Oak Street", "78701"), ("12 Oak Street", "78702")),
        (("12 Oak Street", "78701"), ("12 Oak Road", "78701")),
        (("12 Oak Street Apt 3", "78701"), ("12 Oak Street Apt 4", "78701")),
        (("12 Oak Street", "78701"), ("1 2 Oak Street", "78701")),
    ],
)  # fmt: skip
def test_addresses_that_differ(one: tuple[str, str], two: tuple[str, str]) -> None:
    assert normal_address(*one) != normal_address(*two)


@pytest.mark.parametrize(
    ("street", "code"), [(None, "78701"), ("12 Oak St", None), ("Oak St", "78701"), ("12 Oak", " ")]
)
def test_what_is_no_household(street: str | None, code: str | None) -> None:
    assert normal_address(street, code) is None


@pytest.mark.parametrize(
    ("text", "country", "number"),
    [
        ("(512) 555-0100", "US", "+15125550100"),
        ("+1 512 555 0100 ext. 7", None, "+15125550100"),
        ("030 5550100", "DE", "+49305550100"),
        ("011 49 30 5550100", "US", "+49305550100"),
        ("512 555 0100", None, None),
        ("12", "US", None),
        ("call me", "US", None),
        ("", "US", None),
        ("٠٣٠ ٥٥٥٠١٠٠", "DE", "+49305550100"),
    ],
)
def test_phones_of_the_world(text: str, country: str | None, number: str | None) -> None:
    assert world_phone(text, country) == number


def test_the_digests_of_before_stay_beside_the_new_ones() -> None:
    lead = Lead("1", emails=("A@example.com",), phones=("(512) 555-0100", "x"), street="1 Oak St", zip="78701")
    old = identities(TENANT, lead)
    new = identities(TENANT, lead, households=True, country="US")
    assert old.personal < new.personal
    assert not old.household
    assert len(new.household) == 1
    assert [{fine, coarse} <= new.personal for fine, coarse in new.twins] == [True]
    # As they are stored since the first release: changing them would lose every known person in silence.
    assert sorted(digest.hex()[:8] for digest in old.personal) == STORED


STORED = ["433f57de", "d56f01d0"]
