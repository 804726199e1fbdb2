from book import Book


class Store:
    def __init__(self) -> None:
        self.books: list[Book] = []

    def add(self, book: Book) -> None:
        self.books.append(book)

    def cheapest(self) -> Book:
        return min(self.books, key=lambda book: book.price)
