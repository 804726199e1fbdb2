class Book:
    def __init__(self, title: str, price: float) -> None:
        self.title = title
        self.price = price
