"""Random damage to a folder of stored objects."""

from __future__ import annotations

from storage_folder import pages, records


def one(chance, folder):
    return chance.choice(chance.choice([records, pages])(folder))


def flip_a_byte(chance, folder):
    path = one(chance, folder)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(chance, folder):
    path = one(chance, folder)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def delete(chance, folder):
    one(chance, folder).unlink()


def delete_every_kth(chance, folder):
    found = chance.choice([records(folder), pages(folder)])
    for path in found[chance.randrange(2) :: chance.randrange(2, 5)]:
        path.unlink()


def swap(chance, folder):
    kind = chance.choice([records(folder), pages(folder, "deepseek_v4_c4")])
    if len(kind) < 2:
        return
    left, right = chance.sample(kind, 2)
    left_bytes, right_bytes = left.read_bytes(), right.read_bytes()
    left.write_bytes(right_bytes)
    right.write_bytes(left_bytes)


def overwrite_a_run(chance, folder):
    path = one(chance, folder)
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randrange(1, 4096))
    data[start:end] = chance.randbytes(end - start)
    path.write_bytes(data)


DAMAGES = (flip_a_byte, cut, delete, delete_every_kth, swap, overwrite_a_run)
