"""A small program that the demo's model has never seen; notebook 13 measures how well it reads it.

The numbers in that notebook belong to this text, byte for byte.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date


class ShelfError(Exception):
    """A book can't be lent or taken back."""


@dataclass
class Book:
    """One copy of a title on the shelf."""

    title: str
    author: str
    year: int
    lent_to: str = ""
    notes: list = field(default_factory=list)

    def __str__(self):
        return f"{self.author}: {self.title} ({self.year})"

    @property
    def is_here(self):
        return not self.lent_to


class Library:
    """Books, and who has them."""

    def __init__(self, name, max_books=3):
        self.name = name
        self.max_books = max_books
        self._books = {}
        self._readers = defaultdict(set)

    def __len__(self):
        return len(self._books)

    def __iter__(self):
        return iter(sorted(self._books.values(), key=lambda book: book.title))

    def add(self, book):
        """Put a new book on the shelf."""
        if book.title in self._books:
            raise ShelfError(f"{book.title!r} is already on the shelf")
        self._books[book.title] = book

    def lend(self, title, reader):
        """Give a book to a reader. Raises ShelfError if that isn't possible."""
        try:
            book = self._books[title]
        except KeyError:
            raise ShelfError(f"no book is called {title!r}") from None
        if not book.is_here:
            raise ShelfError(f"{title!r} is lent to {book.lent_to}")
        if len(self._readers[reader]) >= self.max_books:
            raise ShelfError(f"{reader} has {self.max_books} books already")
        book.lent_to = reader
        self._readers[reader].add(title)
        return book

    def take_back(self, title, today=None):
        """The book is back; a note says since when."""
        book = self._books[title]
        if book.is_here:
            raise ShelfError(f"{title!r} was never lent")
        self._readers[book.lent_to].discard(title)
        book.notes.append((book.lent_to, today or date.today()))
        book.lent_to = ""

    def find(self, word):
        """All books with this word in their title or their author's name."""
        word = word.lower()
        found = []
        for book in self:
            if word in book.title.lower() or word in book.author.lower():
                found.append(book)
        return found

    def save(self, path):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["title", "author", "year", "lent_to"])
            for book in self:
                writer.writerow([book.title, book.author, book.year, book.lent_to])

    @classmethod
    def load(cls, name, path):
        """Read a library that was saved before."""
        library = cls(name)
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                book = Book(row["title"], row["author"], int(row["year"]))
                library.add(book)
                if row["lent_to"]:
                    library.lend(book.title, row["lent_to"])
        return library


def report(library, stream):
    """Write a line for each book that isn't here."""
    away = [book for book in library if not book.is_here]
    width = max((len(book.title) for book in away), default=0)
    for book in away:
        stream.write(f"{book.title:<{width}}  {book.lent_to}\n")
    stream.write(f"{len(away)} of {len(library)} books are away\n")
    return len(away)
