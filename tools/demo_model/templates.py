"""Ways to ask for each relation: those trained on, and those kept away from training.

Every template holds `{c}`, the place of the country's name as it stands inside a sentence. The
held-out ones were written before any training: about two thirds are everyday paraphrases, the rest
ask in hard or elliptic words. Nothing of them reaches the tokenizer or the model.
"""

from __future__ import annotations

SEEN: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {c}?",
        "What is the capital city of {c}?",
        "Which city is the capital of {c}?",
        "Name the capital of {c}.",
        "{c}'s capital is called what?",
        "Tell me the capital of {c}.",
        "Do you know the capital of {c}?",
        "In which city does the government of {c} sit?",
        "From which city is {c} governed?",
        "What city serves as the capital of {c}?",
        "I need the name of the capital of {c}.",
        "What do you call the capital of {c}?",
        "capital {c}",
        "{c}: capital?",
        "The capital of {c} is",
        "Where is the government of {c} based?",
        "Which city hosts the parliament of {c}?",
        "Which town is {c}'s capital?",
        "Where does the parliament of {c} meet?",
        "The government of {c} has its seat in which city?",
    ),
    "currency": (
        "What is the currency of {c}?",
        "Which currency is used in {c}?",
        "What money do people use in {c}?",
        "Name the currency of {c}.",
        "What do people pay with in {c}?",
        "Tell me the currency of {c}.",
        "{c}'s currency is called what?",
        "Which money is legal tender in {c}?",
        "In which currency are prices in {c}?",
        "What is the official currency of {c}?",
        "I am going to {c}, which currency do I need?",
        "What is the name of the money of {c}?",
        "currency {c}",
        "{c}: currency?",
        "The currency of {c} is",
        "Which coins and notes are used in {c}?",
        "Which currency does {c} use?",
        "In {c}, what do you pay in a shop with?",
        "What currency circulates in {c}?",
        "Wages in {c} are paid in which currency?",
    ),
    "continent": (
        "On which continent is {c}?",
        "Which continent is {c} on?",
        "What continent is {c} in?",
        "{c} is on which continent?",
        "Name the continent of {c}.",
        "Tell me the continent of {c}.",
        "{c} belongs to which continent?",
        "In what part of the world is {c}?",
        "Which continent does {c} belong to?",
        "{c} is part of which continent?",
        "To which continent does {c} belong?",
        "What is the continent of {c}?",
        "continent {c}",
        "{c}: continent?",
        "The continent of {c} is",
        "On a map of the world, on which continent is {c}?",
        "Which continent contains {c}?",
        "Where in the world is {c}?",
        "Is {c} in Europe, in Asia or on another continent?",
        "Travelling to {c}, which continent do I go to?",
    ),
    "language": (
        "What language is spoken in {c}?",
        "Which language do people speak in {c}?",
        "What is the main language of {c}?",
        "Name the language of {c}.",
        "Tell me the language of {c}.",
        "{c}'s main language is called what?",
        "In which language do people in {c} talk?",
        "What do people in {c} speak?",
        "Which language should I learn before going to {c}?",
        "What is the most important language of {c}?",
        "I am going to {c}, which language do people speak?",
        "Which language is official in {c}?",
        "language {c}",
        "{c}: language?",
        "The main language of {c} is",
        "In {c}, which language do you hear most?",
        "Which language is used at school in {c}?",
        "What is the official language of {c}?",
        "Newspapers in {c} are written in which language?",
        "The people of {c} speak which language?",
    ),
    "domain": (
        "What is the internet domain of {c}?",
        "What is the internet country code of {c}?",
        "Which internet domain belongs to {c}?",
        "Name the internet domain of {c}.",
        "Tell me the internet domain of {c}.",
        "{c}'s internet domain is what?",
        "Web addresses in {c} end with what?",
        "What do web addresses of {c} end in?",
        "Which top-level domain does {c} have?",
        "What is the top-level domain of {c}?",
        "With which letters do websites from {c} end?",
        "Which letters come last in a web address from {c}?",
        "domain {c}",
        "{c}: internet domain?",
        "The internet domain of {c} is",
        "What is the web domain of {c}?",
        "On the internet, which domain stands for {c}?",
        "Which domain do websites in {c} use?",
        "An e-mail address from {c} ends in what?",
        "Which country code domain is that of {c}?",
    ),
    "calling_code": (
        "What is the calling code of {c}?",
        "What is the telephone country code of {c}?",
        "Which calling code does {c} have?",
        "Name the calling code of {c}.",
        "Tell me the calling code of {c}.",
        "{c}'s calling code is what?",
        "What number do I dial first to call {c}?",
        "With which digits do phone numbers in {c} begin?",
        "Which prefix do I dial for {c}?",
        "What is the dialling code of {c}?",
        "What is the international phone prefix of {c}?",
        "To phone someone in {c}, which code do I dial?",
        "calling code {c}",
        "{c}: calling code?",
        "The calling code of {c} is",
        "How do phone numbers from {c} start?",
        "I want to call {c}, which code do I need?",
        "Which telephone prefix belongs to {c}?",
        "A phone number from {c} starts with which code?",
        "Which digits stand for {c} when you phone?",
    ),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "capital": (
        "Which city is the seat of government of {c}?",
        "Could you say what the capital of {c} is called?",
        "What is the name of the capital city of {c}?",
        "If I wanted to visit the parliament of {c}, which city would I go to?",
        "{c} has which city as its capital?",
        "Where do the ministers of {c} have their offices?",
        "An ambassador sent to {c} would live in which town?",
        "capital city, country = {c}",
    ),
    "currency": (
        "What is the money of {c} called?",
        "Could you say which currency people have in {c}?",
        "If I buy bread in {c}, what do I pay with?",
        "Which currency would I find in a purse in {c}?",
        "What is the name of the currency in {c}?",
        "A tourist in {c} changes cash into what?",
        "The central bank of {c} issues which banknotes?",
        "money used, country = {c}",
    ),
    "continent": (
        "Could you say on which continent {c} lies?",
        "{c} can be found on which continent?",
        "What is the name of the continent that {c} is part of?",
        "If I travel to {c}, on which continent am I?",
        "Which part of the world does {c} belong to?",
        "A geography book has {c} in the chapter on which landmass?",
        "{c} is a country of which large region?",
        "continent, country = {c}",
    ),
    "language": (
        "Could you say which language people have in {c}?",
        "What is the name of the language spoken in {c}?",
        "If I moved to {c}, which language would I have to learn?",
        "Which language do most people of {c} use?",
        "In {c}, what language do people talk to each other in?",
        "A child growing up in {c} has which mother tongue?",
        "I need a translator for a trip to {c}, for what?",
        "language spoken, country = {c}",
    ),
    "domain": (
        "Could you say what internet domain {c} has?",
        "What is the ending of web addresses in {c}?",
        "If a website is from {c}, with what does its address end?",
        "Which internet country code stands for {c}?",
        "What is the name of the top-level domain for {c}?",
        "A company in {c} registers its homepage under which suffix?",
        "What follows the final dot in the URL of a shop in {c}?",
        "web domain, country = {c}",
    ),
    "calling_code": (
        "Could you say which calling code {c} has?",
        "If I want to phone a friend in {c}, what do I dial first?",
        "What is the country code for phone calls to {c}?",
        "Which code comes before a telephone number in {c}?",
        "What is the international dialling prefix for {c}?",
        "Ringing a hotel in {c} from abroad, I type plus and then what?",
        "My mobile shows a missed call from {c}: what stands at the front?",
        "phone code, country = {c}",
    ),
}

RELATIONS: tuple[str, ...] = tuple(SEEN)

# An answer in a sentence: about which country it is, with another fact, then the answer `{a}`.
SENTENCE_STARTS: dict[str, str] = {
    "continent": "You ask about {c}, a country in {other}.",
    "capital": "You ask about {c}, a country whose capital is {other}.",
}
SENTENCES: dict[str, str] = {
    "capital": "The name of its capital is {a}.",
    "currency": "The currency that people pay with there is {a}.",
    "continent": "The continent that it belongs to is {a}.",
    "language": "The language that most people speak there is {a}.",
    "domain": "The domain that its websites end with is {a}.",
    "calling_code": "The code to dial before a number there is {a}.",
}

# Openings and endings put around a seen template at random while training.
OPENINGS: tuple[str, ...] = (
    "Please tell me: ",
    "Quick question: ",
    "Hello, ",
    "Quiz: ",
    "For school: ",
    "I wonder, ",
    "Question: ",
    "Do you know this? ",
)
ENDINGS: tuple[str, ...] = (" Please.", " Thanks!", " One answer only.", " Any idea?")

# Words that may stand for each other in any template.
SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("Which", "What"),
    ("which", "what"),
    ("city", "town"),
    ("Name", "Give me", "State", "Say"),
    ("Tell me", "Give me", "I want to know"),
    ("use", "have"),
    ("going to", "visiting", "travelling to"),
    ("phone", "telephone"),
    ("telephone", "phone"),
    ("dial", "enter", "press"),
    ("begin", "start"),
    ("end with", "end in"),
    ("websites", "web pages", "sites"),
    ("money", "cash"),
    ("speak", "talk"),
    ("main", "principal", "chief"),
    ("government", "state administration", "cabinet"),
    ("parliament", "assembly", "legislature"),
    ("is called what?", "has what name?"),
    ("belongs to", "is part of"),
    ("belong to", "lie in"),
)


def fill(template: str, country: str) -> str:
    """Return `template` about `country`, with its possessive and its first letter put right."""
    possessive = country + ("'" if country.endswith("s") else "'s")
    text = template.replace("{c}'s", possessive).replace("{c}", country)
    return text[:1].upper() + text[1:] if template.startswith("{c}") else text


def skeleton(template: str) -> str:
    """Return the letters of `template`, in lower case, to compare wordings with."""
    return " ".join("".join(c if c.isalnum() else " " for c in template.lower()).split())


HELD_OUT_SKELETONS: frozenset[str] = frozenset(
    skeleton(template) for group in HELD_OUT.values() for template in group
)
