"""Invented buyers and sellers around Austin, the same ones for the same seed."""

from __future__ import annotations

from random import Random
from typing import Any

FIRST = ("Lena", "Marco", "Nadia", "Omar", "Paula", "Quinn", "Rosa", "Sven", "Tara", "Uri", "Vera", "Wade", "Yara")
LAST = ("Barros", "Castell", "Dunne", "Elmore", "Faber", "Grant", "Hollis", "Ibarra", "Keller", "Moreau", "Novak")
PLACES = (
    ("Austin", "78701"),
    ("Austin", "78704"),
    ("Austin", "78745"),
    ("Austin", "78759"),
    ("Round Rock", "78664"),
    ("Cedar Park", "78613"),
    ("Georgetown", "78628"),
    ("Pflugerville", "78660"),
    ("Leander", "78641"),
    ("Lakeway", "78734"),
    ("Bee Cave", "78738"),
    ("Buda", "78610"),
    ("Kyle", "78640"),
    ("Dripping Springs", "78620"),
)
STREETS = ("Elm St", "Oak Hollow Dr", "Pecan Ln", "Live Oak Ave", "Juniper Ct", "Bluebonnet Trl", "Cypress Bend")
SOURCES = ("Zillow", "Realtor.com", "Website", "Facebook Ads", "Referral", "Open House")
FORMS = {
    "Website": ("Home valuation", "Property inquiry", "Schedule a showing"),
    "Facebook Ads": ("Instant form",),
}
CAMPAIGNS = {"Facebook Ads": ("Spring buyers", "Sell before summer"), "Website": ("Newsletter",)}
# 555-01xx is reserved for fiction and has only 100 numbers, so the area code varies: two leads that share a phone
# are the same person to whoever matches identities.
AREAS = (512, 737, *(code for code in range(201, 990) if code not in (512, 737, 555) and code % 100 != 11))


def invent(seed: int, number: int) -> dict[str, Any]:
    """Fields of lead `number` (0, 1, ...) of the world `seed`; equal arguments give equal fields."""
    rng = Random(f"{seed}:{number}")  # noqa: S311 - repeatable invention, not a secret
    first, last = rng.choice(FIRST), rng.choice(LAST)
    city, zip_code = rng.choice(PLACES)
    source = rng.choice(SOURCES)
    seller = rng.random() < 0.3
    kind = "Seller" if seller else "Buyer"
    area = AREAS[number // 100 % len(AREAS)]
    return {
        "name": f"{first} {last}",
        "source": source,
        "source_url": f"https://listings.example.com/homes/{number + 1}",
        "type": kind,
        "stage": "Lead",
        "price": rng.randrange(200_000, 1_500_000, 5_000),
        "street": f"{rng.randrange(1, 9900)} {rng.choice(STREETS)}",
        "city": city,
        "state": "TX",
        "zip": zip_code,
        "country": "US",
        "form": rng.choice(FORMS.get(source, (None,))),
        "campaign": rng.choice(CAMPAIGNS.get(source, (None,))),
        "language": "Spanish" if rng.random() < 0.2 else "English",
        "tags": [kind, *(["Hot"] if rng.random() < 0.15 else [])],
        "emails": [f"{first}.{last}{number + 1}@example.com".lower()],
        "phones": [f"({area}) 555-01{number % 100:02d}"],
        "custom": {"beds": rng.randrange(1, 6)},
    }
