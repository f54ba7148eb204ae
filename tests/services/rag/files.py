"""Documents on different topics, written for these tests, and files made of them."""

from __future__ import annotations

from fpdf import FPDF

TOPICS = {
    "beekeeping": (
        "A beehive in winter must be kept dry. The bees form a cluster around the queen and shiver to "
        "keep warm. The keeper lifts the hive at its back to judge by its weight how much honey is left. "
        "In February sugar dough is laid on the frames when the stores run low. The entrance is narrowed "
        "so that mice stay outside."
    ),
    "sailing": (
        "To reef the mainsail, the helmsman turns the boat towards the wind until the sail flaps. The "
        "halyard is eased, the tack is hooked in, and the reefing line is hauled tight at the boom. A "
        "reef is taken early, when the first white crests are seen. The jib is furled afterwards so that "
        "the rudder stays balanced."
    ),
    "bread": (
        "The sourdough starter is fed with rye flour and water on the evening before baking. The dough "
        "rests for four hours and is folded every thirty minutes. The oven is heated to 250 degrees with "
        "a cast-iron pot in it. The loaf is baked for half an hour under the lid, and for another twenty "
        "minutes without it."
    ),
}

QUESTIONS = {
    "beekeeping": "How does one find out how much honey the colony has left?",
    "sailing": "When should the crew make the mainsail smaller?",
    "bread": "How long does the loaf stay in the hot oven?",
}


def long_text(topic: str, paragraphs: int) -> str:
    """A text of about 75 tokens per paragraph, no two alike."""
    return "\n\n".join(f"Note {number}. {TOPICS[topic]}" for number in range(1, paragraphs + 1))


def pdf(pages: list[str], password: str | None = None) -> bytes:
    document = FPDF()
    document.set_font("Helvetica", size=11)
    for page in pages:
        document.add_page()
        if page:
            document.multi_cell(0, 6, page)
    if password is not None:
        document.set_encryption(owner_password="owner", user_password=password)
    return bytes(document.output())
