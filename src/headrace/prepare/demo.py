"""The demo's prompts, written for this project: six kinds, from seeded templates.

In: how many, and a seed. Out: distinct chats of one user turn, their kind as `source`. Words and numbers vary so that
the target's answers differ.
"""

import random
from collections.abc import Callable
from typing import Any

from headrace.errors import PrepareError

_NAMES = (
    "Ada Ben Chloe David Elif Farah Goran Hana Ivan Jade Kofi Lena Marco Nora Omar Petra Quinn Rosa Sven Tara".split()
)
_THINGS = (
    "apples books chairs coins cups flowers keys lamps maps nails pencils plates ropes shells stamps tickets".split()
)
_PLACES = "Lisbon Oslo Cairo Lima Kyoto Nairobi Quebec Sofia Tallinn Perth Izmir Bergen Porto Hanoi Cusco Malmo".split()
_JOBS = (
    "baker carpenter dentist engineer farmer gardener librarian nurse painter pilot plumber tailor teacher vet".split()
)
_ANIMALS = (
    "badger crane dolphin eagle ferret goat heron ibex jackal koala lynx mole otter penguin raven seal toad".split()
)
_TOPICS = (
    "bread,bridges,clouds,coffee,compasses,forests,glass,gravity,honey,ice,kites,lighthouses,magnets,maps,"
    "mountains,paper,rain,rivers,salt,sleep,snow,soap,steam,tea,tides,trains,volcanoes,windmills"
).split(",")
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_VERBS = "walked drove cycled sailed flew hurried travelled wandered".split()
_FUNCTIONS = (
    "reverses a string|counts the vowels in a string|returns the largest number in a list|checks if a number is even|"
    "adds two numbers|returns the factorial of n|removes duplicates from a list|checks if a word is a palindrome|"
    "converts Celsius to Fahrenheit|sums the squares of a list|joins words by dashes|finds the shortest word in a list|"
    "returns the first n even numbers|counts words in a sentence|swaps two values|returns the average of a list|"
    "checks if a year is a leap year|capitalises every word|finds the index of an item|multiplies all numbers in a list"
).split("|")
_NAMING = "solve compute helper run_it do_task process calculate work answer handle".split()

Kind = Callable[[random.Random], str]


def _arithmetic(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b, c = rng.randint(3, 60), rng.randint(2, 30), rng.randint(2, 9)
    return rng.choice(
        [
            f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
            f"{name} packs {a} {thing} into each of {c} boxes. How many {thing} are there in all?",
            f"{other} had {a + b} {thing} and gave {b} of them to {name}. How many are left?",
            f"A shop sells {thing} for {c} dollars each. How much do {b} {thing} cost?",
            f"What is {a} plus {b}? Explain each step.",
            f"What is {a * c} divided by {c}? Show your work.",
            f"{name} reads {b} pages a day. How many pages does {name} read in {c} days?",
            f"{name} and {other} share {2 * a} {thing} equally. How many does each get?",
            f"A train travels {a} miles every hour. How far does it go in {c} hours?",
            f"Subtract {b} from {a + b} and explain how you did it.",
            f"There are {c} rows with {b} {thing} in each row. How many {thing} are there?",
            f"{name} saves {c} dollars every week. How much money is saved after {b} weeks?",
        ]
    )


def _code(rng: random.Random) -> str:
    what, name = rng.choice(_FUNCTIONS), rng.choice(_NAMING)
    return rng.choice(
        [
            f"Write a Python function that {what}.",
            f"Write a short Python function named {name} that {what}.",
            f"Show me Python code that {what}.",
            f"In Python, write a function called {name} that {what}. Keep it short.",
            f"Give me a Python function that {what}, with a docstring.",
            f"How do I write a function that {what} in Python?",
            f"Please write {name}(), a Python function that {what}.",
            f"Write a function in JavaScript that {what}.",
            f"Write Python code for a function that {what} and call it once.",
            f"I need a small function that {what}. Use Python.",
            f"Define a function {name} in Python. It {what}.",
            f"Write a one-line Python function that {what}.",
        ]
    )


def _extraction(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    place, job, day, verb = rng.choice(_PLACES), rng.choice(_JOBS), rng.choice(_DAYS), rng.choice(_VERBS)
    number, thing = rng.randint(2, 90), rng.choice(_THINGS)
    text = rng.choice(
        [
            f"{name}, a {job} from {place}, {verb} to the market on {day} and bought {number} {thing}.",
            f"On {day}, {name} met {other} in {place}. {other} works as a {job} and is {number} years old.",
            f"The {job} {name} sent {number} {thing} to {other} in {place} last {day}.",
            f"{name} {verb} from {place} on {day} with {number} {thing} for {other}, the {job}.",
        ]
    )
    return rng.choice(
        [
            f"Extract the name, the place and the day from this text: {text}",
            f"Who is mentioned in this sentence, and where? {text}",
            f"List all the facts in this text: {text}",
            f"Find the number in this sentence and say what it counts: {text}",
            f"Read the text and answer: what happened on {day}? {text}",
            f"What is the job of the person in this text? {text}",
            f"Write the names in this text as a list: {text}",
            f"Extract the person, job and city as key: value lines. {text}",
            f"Summarise this in one sentence: {text}",
            f"Which city is named here? {text}",
            f"Which day of the week is named here? {text}",
            f"Turn this text into a JSON object with name, place and day: {text}",
        ]
    )


def _rewriting(rng: random.Random) -> str:
    name, place, day = rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_DAYS)
    animal, thing, topic = rng.choice(_ANIMALS), rng.choice(_THINGS), rng.choice(_TOPICS)
    text = rng.choice(
        [
            f"the {animal} sat near the {thing} in {place}",
            f"{name} dont like {topic} but he go to {place} every {day}",
            f"we was looking for {thing} when the {animal} come back",
            f"i think {topic} is very nice and very good",
            f"hey, can u send me the {thing} by {day}? thx, {name}",
            f"{name} said that the meeting in {place} is moved to {day}",
        ]
    )
    return rng.choice(
        [
            f"Correct the grammar: {text}",
            f"Rewrite this sentence more formally: {text}",
            f"Make this sentence shorter: {text}",
            f"Rewrite this in the past tense: {text}",
            f"Rewrite this as a polite email: {text}",
            f"Say this in simpler words: {text}",
            f"Rewrite this in the future tense: {text}",
            f"Turn this sentence into a question: {text}",
            f"Make this sound more exciting: {text}",
            f"Rewrite this sentence with proper punctuation: {text}",
            f"Put this into the first person: {text}",
            f"Rewrite this for a child: {text}",
        ]
    )


def _short(rng: random.Random) -> str:
    topic, animal, job, place = rng.choice(_TOPICS), rng.choice(_ANIMALS), rng.choice(_JOBS), rng.choice(_PLACES)
    return rng.choice(
        [
            f"In one sentence, what is the use of {topic}?",
            f"What does a {job} do? Answer briefly.",
            f"Is a {animal} a mammal or a bird? Answer in one sentence.",
            f"Which country is {place} in?",
            f"Give a one-sentence definition of {topic}.",
            f"What does a {animal} eat? Answer in one sentence.",
            f"Why do people like {topic}? Answer in two sentences.",
            f"Where does a {animal} live? Answer briefly.",
            f"What tool does a {job} use most? One sentence.",
            f"Name one fact about {place}.",
            f"Describe a {animal} in one sentence.",
            f"Explain {topic} to a child in two sentences.",
        ]
    )


def _lists(rng: random.Random) -> str:
    topic, animal, job, place = rng.choice(_TOPICS), rng.choice(_ANIMALS), rng.choice(_JOBS), rng.choice(_PLACES)
    number = rng.randint(3, 5)
    return rng.choice(
        [
            f"List {number} facts about {topic}.",
            f"Give me {number} tips for a new {job}.",
            f"Name {number} things to see in {place}.",
            f"List {number} reasons to learn about {topic}.",
            f"Write {number} questions about {topic}.",
            f"List {number} words that describe a {animal}.",
            f"Give {number} names for a pet {animal}.",
            f"List {number} tools that a {job} needs.",
            f"Write a numbered list of {number} uses of {topic}.",
            f"What are {number} things to pack for a trip to {place}?",
            f"List {number} ways to explain {topic} to a class.",
            f"Give me {number} titles for a story about a {animal} in {place}.",
        ]
    )


KINDS: dict[str, Kind] = {
    "arithmetic": _arithmetic,
    "code": _code,
    "extraction": _extraction,
    "rewriting": _rewriting,
    "short answers": _short,
    "lists": _lists,
}
_MOST_TRIES = 200


def demo_prompts(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Write `num` distinct prompts, the kinds in turn; the first n of a larger number are the same.

    Raises: PrepareError when the templates cannot give so many.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for i in range(num):
        kind = list(KINDS)[i % len(KINDS)]
        for _ in range(_MOST_TRIES):
            text = KINDS[kind](rng)
            if text not in seen:
                break
        else:
            raise PrepareError(f"{num} distinct prompts", f"{len(seen)}", "lower prepare.num_demo_prompts")
        seen.add(text)
        rows.append({"messages": [{"role": "user", "content": text}], "source": kind})
    return rows
