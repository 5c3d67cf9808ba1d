"""Any interleaving of append, fork, trim and release keeps every sequence's tokens."""

from chunkdelta.cache import OutOfPages, PageAllocator, PageTable
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

PAGES, SIZE = 12, 16


class Tables(RuleBasedStateMachine):
    """Against a model that stores each sequence as a list of its tokens."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.slots = {}  # what the pool would hold
        self.model = []  # (table, tokens)
        self.next_token = 0

    def tokens_of(self, table):
        return next(tokens for held, tokens in self.model if held is table)

    @rule(target=tables)
    def new(self):
        table = PageTable(self.allocator, SIZE)
        self.model.append((table, []))
        return table

    @rule(table=tables, count=st.integers(0, 40))
    def append(self, table, count):
        before = (table.length, table.pages, self.allocator.num_free)
        needed = table.pages_needed(count)
        try:
            appended = table.append(count)
        except OutOfPages:
            assert needed > before[2]
            assert (table.length, table.pages, self.allocator.num_free) == before
            return
        assert self.allocator.num_free == before[2] - needed
        for source, target in zip(*appended.copies, strict=True):
            for offset in range(SIZE):
                self.slots[target * SIZE + offset] = self.slots.get(source * SIZE + offset)
        for slot in appended.slots.tolist():
            self.slots[slot] = self.next_token
            self.tokens_of(table).append(self.next_token)
            self.next_token += 1

    @rule(table=tables, fraction=st.floats(0, 1))
    def trim(self, table, fraction):
        count = int(fraction * table.length)
        table.trim(count)
        tokens = self.tokens_of(table)
        del tokens[len(tokens) - count :]

    @rule(target=tables, table=tables)
    def fork(self, table):
        other = table.fork()
        self.model.append((other, list(self.tokens_of(table))))
        return other

    @rule(table=consumes(tables))
    def release(self, table):
        table.release()
        self.model = [(held, tokens) for held, tokens in self.model if held is not table]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for table, tokens in self.model:
            slots = [table.pages[i // SIZE] * SIZE + i % SIZE for i in range(table.length)]
            assert [self.slots[slot] for slot in slots] == tokens

    @invariant()
    def no_page_is_lost(self):
        held = [page for table, _ in self.model for page in table.pages]
        for page in range(PAGES):
            assert self.allocator.ref_count(page) == held.count(page)
        assert self.allocator.num_free == PAGES - len(set(held))


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTables = Tables.TestCase
