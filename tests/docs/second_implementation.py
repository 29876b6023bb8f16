"""A second implementation of docs/protocol.md: the standard library and numpy, and nothing of `templar`."""

import hashlib
import math
import re
import statistics
import struct
import zlib
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np


class RefusedError(Exception):
    """Bytes that are no legal payload; its text is the reason code."""


def refuse_if(condition, reason):
    if condition:
        raise RefusedError(reason)


def whole_bytes(bits):
    return -(-bits // 8)


class Spec:
    """All sections of docs/protocol.md but 14."""

    VERSION = 10
    MAX_STEP = 552

    @staticmethod
    def key(text):
        """Section 4: what an object key says."""
        number, version = "(?:0|[1-9][0-9]{0,11})", "v(?P<version>[0-9A-Za-z.+]{1,32})"
        window, both = f"(?P<window>{number})", f"(?P<window>{number})-(?P<uid>{number})"
        forms = (
            rf"(?P<kind>commit|manifest|roster|decision|proof|report|evidence|debug)-{both}-{version}\.json",
            rf"(?P<kind>gradient|private)-{both}-{version}\.bin",
            rf"(?P<kind>checkpoint)-{both}-{version}/(?P<file>[0-9A-Za-z][0-9A-Za-z._-]{{0,127}})",
            rf"(?P<kind>aggregator)-{window}-{version}\.bin",
            rf"(?P<kind>peers)_{window}_{version}\.json",
            rf"(?P<kind>start_window|plan)_{version}\.json",
            rf"(?P<kind>lease|lease_heartbeat)-(?P<role>[a-z]{{1,16}})-(?P<holder>[0-9a-f]{{32}})-{version}\.json",
        )
        match = next(filter(None, (re.fullmatch(form, text) for form in forms)), None)
        if match is None:
            return None
        parts: dict[str, Any] = dict.fromkeys(("kind", "window", "uid", "version", "file", "role", "holder"))
        parts |= match.groupdict()
        return parts | {name: int(parts[name]) for name in ("window", "uid") if parts[name] is not None}

    @staticmethod
    def adopts(plan, found, window, network):
        """Section 2: whether a roster's entry of the plan counts; the signatures are another matter."""
        entry, signers = found["entry"], [each["hotkey"] for each in found["approvals"]]
        first = max([window + network["notice"], *(each["first_window"] + 1 for each in plan[-1:])])
        follows = [network["genesis"], *map(Spec.digest, plan)][-1] == entry["previous"]
        try:
            after = Spec.owners([*plan, entry], network["owners"], entry["first_window"])
        except IndexError:
            return False
        enough = len(set(signers) & set(Spec.owners(plan, network["owners"], window))) >= network["owners_needed"]
        distinct = len(set(after)) == len(after) and all(len(each) >= 46 for each in after)
        is_next = entry["number"] == len(plan) + 1
        in_time = first <= entry["first_window"] <= window + 100 * network["notice"]
        return is_next and follows and in_time and enough and distinct and len(set(signers)) == len(signers)

    @staticmethod
    def owners(plan, first, window):
        """Section 2: who owns the network in a window."""
        found = list(first)
        for entry in plan:
            for name, hotkey in entry["changes"].items() if entry["first_window"] <= window else ():
                if name.startswith("plan.owner_"):
                    found[int(name.removeprefix("plan.owner_")) - 1] = hotkey
        return found

    @staticmethod
    def times(window, rules):
        """Section 3: the intervals of a window."""
        delta, slot = rules["time_window_delta_seconds"], rules["roster_slot_seconds"]
        close = math.floor(window["closed"])
        last, settles = close - rules["commit_guard_seconds"], close + delta + 1 + rules["read_margin_seconds"]
        *starts, end = accumulate([settles, *[slot] * rules["roster_ranks"]])
        return {
            "close": close,
            "commit": [math.floor(window["opened"]) + 1, last],
            "reveal": [close + 1, close + delta],
            "settles": settles,
            "roster_slots": [[(start if rank else close) + 1, start + slot] for rank, start in enumerate(starts)],
            "null_after": end,
            "train_until": last - rules["train_margin_seconds"],
        }

    @staticmethod
    def commitment(bucket):
        """Section 4: what a hotkey commits on chain about its bucket, 128 characters."""
        parts = (bucket["account_id"], 32), (bucket["access_key_id"], 32), (bucket["secret_access_key"], 64)
        return "".join(text + "~" * (length - len(text)) for text, length in parts)

    @staticmethod
    def role(axon):
        """Section 2: what an axon record announces."""
        names = ("version", "ip", "port", "ip_type", "protocol", "placeholder1")
        if [axon.get(name) for name in names] != [0, 0, 1, 4, 4, 84]:
            return None
        return {1: "miner", 2: "validator"}.get(axon.get("placeholder2", 0))

    @staticmethod
    def merged(lists, full):
        """Section 8: the order of the uids of several peer lists."""
        stake, keys = sum(each for each, _ in lists), {}
        for uid in {uid for _, uids in lists for uid in uids}:
            behind = [uids.index(uid) if uid in uids else full + (len(uids) < full) for _, uids in lists]
            rising = sorted(zip(behind, (each for each, _ in lists), strict=True))
            so_far = [sum(each for _, each in rising[: number + 1]) for number in range(len(rising))]
            place = next(place for (place, _), weight in zip(rising, so_far, strict=True) if 2 * weight >= stake)
            if place <= full:
                keys[uid] = place, -sum(each for each, uids in lists if uid in uids), behind, uid
        return sorted(keys, key=lambda uid: keys[uid])

    @staticmethod
    def selected(case, settings, seed):
        """Section 8: the two tiers of a peer list."""
        weights = {int(uid): weight for uid, weight in case["weights"].items()}
        ranked = sorted(case["active"], key=lambda uid: (-weights.get(uid, 0.0), Spec.seed("peers", seed, uid)))
        if len(ranked) < settings["minimum_peers"]:
            return {"peers": None, "reserve": None}
        ranked = [uid for uid in ranked if uid not in case["excluded"]] or ranked
        gather = settings["gather_peer_count"]
        return {"peers": ranked[:gather], "reserve": ranked[gather : gather + settings["reserve_peer_count"]]}

    @staticmethod
    def drawn(case, seed):
        """Section 3: publishers, drawn by stake."""
        weights = {int(uid): max(1, math.floor(stake * 2**20)) for uid, stake in case["stakes"].items()}
        drawn: list[int] = []
        while weights and len(drawn) < case["count"]:
            point = Spec.seed("publishers", seed, len(drawn)) % sum(weights.values())
            ends = zip(weights, accumulate(weights.values()), strict=True)
            drawn.append(next(uid for uid, end in ends if point < end))
            del weights[drawn[-1]]
        return drawn

    @staticmethod
    def decided(words, stakes, quorum):
        """What more than the quorum's share of all stake locked in one ballot; of several the lowest ballot's."""
        locked: dict[tuple[int, str], set[int]] = {}
        for word in words:
            if word["step"] == "lock" and word["value"] is not None and word["locked_in"] == word["ballot"]:
                locked.setdefault((word["ballot"], word["value"]), set()).add(word["uid"])
        needed = quorum * sum(stakes.values())
        enough = [place for place, uids in locked.items() if sum(stakes.get(uid, 0.0) for uid in uids) > needed]
        return min(enough)[1] if enough else None

    @staticmethod
    def canonical(value):
        """Section 1, by hand."""
        if isinstance(value, dict):
            parts = (Spec.canonical(key) + b":" + Spec.canonical(value[key]) for key in sorted(value))
            return b"{" + b",".join(parts) + b"}"
        if isinstance(value, list | tuple):
            return b"[" + b",".join(map(Spec.canonical, value)) + b"]"
        if isinstance(value, str):
            return b'"' + b"".join(map(Spec._escaped, value)) + b'"'
        if isinstance(value, bool) or value is None:
            return {True: b"true", False: b"false", None: b"null"}[value]
        return repr(value).encode()

    @staticmethod
    def _escaped(character):
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
        if character in short:
            return short[character].encode()
        if 0x20 <= ord(character) <= 0x7E:
            return character.encode()
        units = struct.iter_unpack(">H", character.encode("utf-16-be"))
        return "".join(f"\\u{unit:04x}" for (unit,) in units).encode()

    @staticmethod
    def sha256(data):
        return hashlib.sha256(data).hexdigest()

    @staticmethod
    def digest(value):
        return Spec.sha256(Spec.canonical(value))

    @staticmethod
    def seed(domain, *parts):
        data = domain.encode()
        for part in parts:
            text = str(part).encode()
            data += struct.pack("<Q", len(text)) + text
        return int.from_bytes(hashlib.sha256(data).digest()[:16], "little")

    @staticmethod
    def permuted(size, position, *key):
        a = next(number for number in range(max(1, math.isqrt(size)), size + 1) if number * number >= size)
        b = -(-size // a)
        keys = [Spec.seed("templar.permutation", i, size, *key).to_bytes(16, "little") for i in range(8)]

        def h(i, x):
            return int.from_bytes(hashlib.sha256(keys[i] + struct.pack("<Q", x)).digest()[:16], "little")

        while True:
            left, right = divmod(position, b)
            for i in range(8):
                if i % 2 == 0:
                    left = (left + h(i, right)) % a
                else:
                    right = (right + h(i, left)) % b
            position = left * b + right
            if position < size:
                return position

    @staticmethod
    def assigned(case, rules):
        """Section 13: the units of the miners of a window, and the spare ones."""
        epoch, plan, block_hash = rules["epoch"], rules["plan"], rules["block_hash"]
        slots, units, total, key = plan["num_slots"], plan["units_per_slot"], epoch["total_units"], epoch["key"]
        window, uids = case["window"], case["uids"]
        number, place = divmod(window - epoch["first_window"], total // (slots * units))
        first = place * slots * units
        owned = [
            Spec.permuted(total, position, "templar.assignment.units", key, number)
            for position in range(first, first + slots * units)
        ]
        size, name = max(slots, len(uids)), ("templar.assignment.slots", key, window, block_hash)
        places = [Spec.permuted(size, rank, *name) for rank in range(len(uids))]
        of_slot = [owned[slot * units : (slot + 1) * units] if slot < slots else [] for slot in range(size)]
        mine = {uid: of_slot[slot] for uid, slot in zip(uids, places, strict=True)}
        shared = {"block_hash": block_hash, "epoch": epoch, "plan": plan, "uids": uids, "window": window}
        return {
            "units": mine,
            "digests": {uid: Spec.digest(shared | {"uid": uid, "units": each}) for uid, each in mine.items()},
            "spare": [unit for slot in range(slots) if slot not in places for unit in of_slot[slot]],
        }

    @staticmethod
    def packed(case):
        """Section 13: documents as sequences."""
        stream: list[int] = []
        for document in case["documents"]:
            stream += [*document, case["eos"]] if document else []
        length = case["sequence_length"]
        whole = len(stream) // length * length
        return [stream[start : start + length] for start in range(0, whole, length)]

    @staticmethod
    def parameters_digest(params, shapes):
        """Section 10: the digest of parameters, which are given in hex."""
        leaves = []
        for name in sorted(params):
            head = {"domain": "templar/tensor/1", "dtype": "float32", "name": name, "shape": shapes[name]}
            leaves.append(Spec.sha256(Spec.canonical(head) + b"\n" + bytes.fromhex(params[name])))
        return Spec.digest({"domain": "templar/parameters/1", "leaves": leaves})

    @staticmethod
    def proof(case):
        """Section 10: a sync proof and its first draws."""
        key = case["window"], case["block_hash"], case["hotkey"]
        data = "templar.proof:{}:{}:{}".format(*key).encode()
        names, draws = (
            sorted(case["parameters"]),
            [Spec.seed("templar.proof.slice", *key, index) for index in range(32)],
        )
        for draw in draws:
            name = names[draw % len(names)]
            values = bytes.fromhex(case["parameters"][name])
            start = (draw >> 64) % max(1, len(values) // 4 - 63)
            data += f"{name}:{start}:".encode() + values[4 * start : 4 * (start + 64)]
        return {"first_draws": [f"{draw:032x}" for draw in draws[:3]], "proof": Spec.sha256(data)}

    @staticmethod
    def factor(schedule, step):
        """Section 9: the factor of the learning rate."""

        def half_cosine(x):
            if x > 0.5:
                return 1.0 - half_cosine(1.0 - x)
            angle = 3.141592653589793 * x / 2
            term = cosine = 1.0
            for n in range(2, 22, 2):
                term = -term * (angle * angle) / (n * (n - 1))
                cosine += term
            return cosine * cosine

        names = ("warmup_start_factor", "warmup_steps", "eta_min_factor", "t_max")
        start, warmup, low, period = (schedule[name] for name in names)
        if step < warmup:
            return float(start + (1 - start) * step / warmup)
        p = step - warmup
        while schedule["restarts"] and p >= period:
            p, period = p - period, 2 * period
        return float(low + (1 - low) * half_cosine(min(p, period) / period))

    SIGNIFICANDS = (256, 271, 287, 304, 323, 342, 362, 384, 406, 431, 456, 483)

    @staticmethod
    def edges(shape, target):
        folded = [math.prod(shape[:-1]), shape[-1]] if len(shape) > 1 else [math.prod(shape)]
        return [max(edge for edge in range(1, min(side, target) + 1) if side % edge == 0) for side in folded]

    @staticmethod
    def rice(tensor):
        """Section 6: the Rice parameter, None without an index code, and the most bits of a chunk's quotients."""
        n, k = math.prod(tensor["edges"]), tensor["k"]
        if k == n:
            return None, 0
        b = 0
        while k * 2 ** (b + 1) < n:
            b += 1
        return b, k + (n - k) // 2**b

    @staticmethod
    def cut(shape, *, target, k):
        """Section 6: the layout of a tensor."""
        edges = Spec.edges(shape, target)
        length = math.prod(edges)
        found: dict[str, Any] = {"edges": edges, "k": min(k, length), "chunks": math.prod(shape) // length}
        return found | {"rice_parameter": Spec.rice(found)[0], "section_bytes": Spec.section_bytes(found)}

    @staticmethod
    def layout_digest(recipe, use_dct, tensors):
        cuts = [[each["name"], each["shape"], each["edges"], each["k"]] for each in tensors]
        return Spec.digest({"domain": "templar/layout/3", "recipe": recipe, "tensors": cuts, "use_dct": use_dct})

    @staticmethod
    def section_bytes(tensor):
        """Section 6: the shortest and the longest section."""
        chunks, count = tensor["chunks"], tensor["chunks"] * tensor["k"]
        b, most = Spec.rice(tensor)
        index = 0 if b is None else whole_bytes(count * b) + whole_bytes(chunks * most)
        return [2 + chunks, 2 + chunks + whole_bytes(count) + index]

    @staticmethod
    def read_payload(data, layout):
        """Section 6: what is in a payload, as chunks of (index, sign, step); all checks, in order."""
        refuse_if(len(data) < 96 or data[:4] != b"TPLP", "malformed")
        version, recipe, uid, window, digest, hotkey = struct.unpack_from("<BBHQ32s48s", data, 4)
        refuse_if(version != Spec.VERSION, "wrong_version")
        refuse_if(digest.hex() != layout["digest"], "wrong_shapes")
        bounds = [100 + sum(Spec.section_bytes(tensor)[end] for tensor in layout["tensors"]) for end in (0, 1)]
        refuse_if(not bounds[0] <= len(data) <= bounds[1], "wrong_size")
        refuse_if(struct.unpack("<I", data[-4:])[0] != zlib.crc32(data[:-4]), "malformed")
        name = hotkey.rstrip(b"\0")
        refuse_if(not name or not all(0x21 <= byte <= 0x7E for byte in name), "malformed")
        refuse_if(recipe != ["sparseloco", "demo"].index(layout["recipe"]), "malformed")
        found, offset, body = {}, 96, data[:-4]
        for tensor in layout["tensors"]:
            found[tensor["name"]], offset = Spec.read_section(body, offset, tensor)
        refuse_if(offset != len(body), "malformed")
        return {"header": {"window": window, "uid": uid, "hotkey": name.decode()}, "tensors": found}

    @staticmethod
    def read_scales(data, offset, tensor):
        """Section 6: the largest step, the codes of each chunk, and where they end."""
        end = offset + 2 + tensor["chunks"]
        refuse_if(len(data) < end, "malformed")
        top, codes = int.from_bytes(data[offset : offset + 2], "little"), data[offset + 2 : end]
        refuse_if(top > Spec.MAX_STEP or any(code and code + top - 255 < 1 for code in codes), "bad_payload")
        refuse_if(max(codes) != (255 if top else 0), "not_canonical")
        return top, codes, end

    @staticmethod
    def read_section(data, offset, tensor):
        k, n = tensor["k"], math.prod(tensor["edges"])
        b, most = Spec.rice(tensor)
        top, codes, offset = Spec.read_scales(data, offset, tensor)
        active = sum(code > 0 for code in codes)
        count = active * k

        def plane(bits):
            nonlocal offset
            start, offset = offset, offset + whole_bytes(bits)
            return start, bits

        def bit(place, start):
            return data[start + place // 8] >> place % 8 & 1

        def clean(start, bits):
            return not any(bit(place, start) for place in range(bits, 8 * whole_bytes(bits)))

        signs = plane(count)
        remainders = plane(count * (b or 0))
        refuse_if(offset > len(data), "malformed")
        ends: list[int] = []
        if b is not None:
            last = min(len(data), offset + whole_bytes(active * most))
            ones = [place for place in range(8 * (last - offset)) if bit(place, offset)]
            refuse_if(len(ones) < count, "malformed")
            ends = ones[:count]
            quotients = plane(ends[-1] + 1 if ends else 0)
            refuse_if(not clean(*remainders) or not clean(*quotients), "not_canonical")
        refuse_if(not clean(*signs), "not_canonical")
        gaps = [after - before - 1 for before, after in zip([-1, *ends], ends, strict=False)]
        gaps = [
            (gap << b) + sum(bit(place * b + i, remainders[0]) << i for i in range(b)) for place, gap in enumerate(gaps)
        ]
        found, place = [], 0
        for code in codes:
            if code == 0:
                found.append([(index, 1, 0) for index in range(k)])
                continue
            chunk, index = [], -1
            for each in range(place, place + k):
                index += 1 + (gaps[each] if gaps else 0)
                chunk.append((index, -1 if bit(each, signs[0]) else 1, code + top - 255))
            refuse_if(index >= n, "bad_payload")
            found.append(chunk)
            place += k
        return found, offset

    @staticmethod
    def section(steps, rows, tensor):
        """Section 6: the steps of chunks, and these as (index, sign, step), as bytes, part by part."""
        top = max(steps)
        found = {"top": top.to_bytes(2, "little"), "codes": bytes(step and step - top + 255 for step in steps)}
        b, _ = Spec.rice(tensor)
        active = [row for row, step in zip(rows, steps, strict=True) if step]
        flat = [each for row in active for each in row]
        planes = {"signs": [int(sign < 0) for _, sign, _ in flat]}
        if b is not None:
            before = [-1 if place == 0 else row[place - 1][0] for row in active for place in range(len(row))]
            gaps = [each[0] - index - 1 for each, index in zip(flat, before, strict=True)]
            planes["remainders"] = [gap >> i & 1 for gap in gaps for i in range(b)]
            planes["quotients"] = [one for gap in gaps for one in [0] * (gap >> b) + [1]]
        for name, bits in planes.items():
            number = sum(one << place for place, one in enumerate(bits))
            found[name] = number.to_bytes(whole_bytes(len(bits)), "little")
        return found

    @staticmethod
    def payload(header, sections, layout):
        """Section 6: a payload, part by part."""
        parts: dict[Any, bytes] = {
            "magic": b"TPLP",
            "version": bytes([Spec.VERSION]),
            "recipe": bytes([["sparseloco", "demo"].index(layout["recipe"])]),
            "uid": struct.pack("<H", header["uid"]),
            "window": struct.pack("<Q", header["window"]),
            "layout digest": bytes.fromhex(layout["digest"]),
            "hotkey": header["hotkey"].encode().ljust(48, b"\0"),
            **sections,
        }
        return parts | {"checksum": struct.pack("<I", zlib.crc32(b"".join(parts.values())))}

    @staticmethod
    def quanta(step):
        return Spec.SIGNIFICANDS[(step - 1) % 12] << ((step - 1) // 12) if step else 0

    @staticmethod
    def scale(step):
        return math.ldexp(Spec.quanta(step), -44)

    @staticmethod
    def nearest(mean):
        """Section 6: the step of a mean."""
        quanta = Fraction(mean) * 2**44
        return sum(2 * quanta > Spec.quanta(step) + Spec.quanta(step + 1) for step in range(Spec.MAX_STEP))

    @staticmethod
    def value_code(mean):
        step = Spec.nearest(mean)
        return {"step": step, "quanta": Spec.quanta(step), "scale": Spec.scale(step)}

    @staticmethod
    def total(numbers):
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [numbers[i] + numbers[i + half] for i in range(half)] + numbers[2 * half :]
        return numbers[0]

    @staticmethod
    def code(rows):
        """Section 6: the step of each chunk."""
        steps = [Spec.nearest(Spec.total([abs(value) for value in row]) / len(row)) for row in rows]
        return [step if step > max(steps) - 255 else 0 for step in steps]

    @staticmethod
    def frequencies(chunk, edges):
        """Section 6: the miner's DCT-II of a chunk, float32, in the order advised."""

        def analyse(x):
            n, stride = len(x), 1
            basis = np.array([[Spec.cosine(n, b, j) for j in range(n)] for b in range(n)]).astype(np.float32)
            found = np.zeros_like(x)

            def products(first, every, values):
                for b in range(first, n, every):
                    total = basis[b, 0] * values[0]
                    for j in range(1, len(values)):
                        total = total + basis[b, j] * values[j]
                    found[b] = total

            while len(x) % 2 == 0:
                half = len(x) // 2
                products(stride, 2 * stride, x[:half] - x[half:][::-1])
                x, stride = x[:half] + x[half:][::-1], 2 * stride
            products(0, stride, x)
            return found

        block = chunk.reshape(-1, edges[-1])
        block = analyse(block.T).T
        return (analyse(block) if len(edges) == 2 else block).flatten()

    @staticmethod
    def compress(case, buffer, update, tensor, call):
        """Section 6, "what a miner does": a tensor's section and its new buffer."""
        grown = Spec.chunked(np.float32(case["learning_rate"]) * update, tensor)
        if case["use_dct"]:
            grown = np.array([Spec.frequencies(chunk, tensor["edges"]) for chunk in grown])
        if case["recipe"] == "sparseloco" or call > 1:
            grown = np.float32(case["decay"]) * Spec.chunked(buffer, tensor) + grown
        ranked = [sorted(range(len(row)), key=lambda index, row=row: (-abs(row[index]), index)) for row in grown]
        chosen = [sorted(order[: tensor["k"]]) for order in ranked]
        values = [[float(row[index]) for index in indices] for row, indices in zip(grown, chosen, strict=True)]
        steps, rows = Spec.code(values), []
        for chunk, (indices, step) in enumerate(zip(chosen, steps, strict=True)):
            found = []
            for place, index in enumerate(indices):
                sign = -1 if values[chunk][place] < 0 else 1
                found.append((index, sign, step))
                if case["recipe"] == "sparseloco" or call > 5:
                    grown[chunk, index] -= np.float32(sign * Spec.scale(step))
            rows.append(found)
        return Spec.section(steps, rows, tensor), Spec.unchunked(grown, tensor)

    @staticmethod
    def cosine(n, b, j):
        return math.sqrt((1 if b == 0 else 2) / n) * math.cos(math.pi * (2 * j + 1) * b / (2 * n))

    @staticmethod
    def elements(chunk, edges):
        """Section 9: the inverse DCT of one chunk in row-major order, in exact integers."""

        def whole(values):
            step = 2.0 ** (math.frexp(max(map(abs, values)))[1] - 24)
            return [round(value / step) for value in values], step

        def transposed(n):
            return [[round(2**25 * Spec.cosine(n, b, j)) for b in range(n)] for j in range(n)]

        height, width = edges if len(edges) == 2 else (1, edges[0])
        numbers, step = whole(chunk)
        f = transposed(width)
        rows = [numbers[row * width : (row + 1) * width] for row in range(height)]
        out = [sum(f[j][b] * row[b] for b in range(width)) * (step * 2.0**-25) for row in rows for j in range(width)]
        if len(edges) == 1:
            return out
        numbers, step = whole(out)
        f = transposed(height)
        return [
            sum(f[i][b] * numbers[b * width + j] for b in range(height)) * (step * 2.0**-25)
            for i in range(height)
            for j in range(width)
        ]

    @staticmethod
    def norms(payloads, name):
        """Section 9: the squared norms of a tensor, and their lower median; without a limit that is the target."""
        norms = [
            sum(Spec.quanta(step) ** 2 for row in each["tensors"][name] for _, _, step in row) for each in payloads
        ]
        positive = sorted(norm for norm in norms if norm)
        return norms, positive[(len(positive) - 1) // 2] if positive else 0

    @staticmethod
    def update(payloads, tensor, layout, median):
        """Section 9, one tensor."""
        name, chunks, edges, recipe = tensor["name"], tensor["chunks"], tensor["edges"], layout["recipe"]
        length = math.prod(edges)
        total, count = [[0] * length for _ in range(chunks)], [[0] * length for _ in range(chunks)]
        heard = 0
        for each, n2 in zip(payloads, Spec.norms(payloads, name)[0], strict=True):
            counts_parts = layout.get("mean_over") == "parts" and recipe == "sparseloco"
            parts = 2 if counts_parts and n2 >= 2 * median > 0 else 1
            heard += parts if n2 > 0 else 0
            m2 = 2**80 if recipe == "demo" else median * parts**2
            keeps = n2 in (0, m2) or (recipe == "sparseloco" and n2 <= m2)
            for chunk, row in enumerate(each["tensors"][name]):
                for index, sign, step in row:
                    s = Spec.quanta(step)
                    s = s if keeps else math.isqrt(s**2 * m2 // n2)
                    total[chunk][index] += sign * s
                    count[chunk][index] += s != 0
        if layout.get("mean_over", "contributors") != "contributors":
            count = [[heard] * length for _ in range(chunks)]
        means = [
            [float(t) / float(max(c, 1)) for t, c in zip(*rows, strict=True)] for rows in zip(total, count, strict=True)
        ]
        if layout["use_dct"]:
            means = [Spec.elements(row, edges) for row in means]
        values = np.sign(np.array(means)) if recipe == "demo" else np.array(means) * 2.0**-44
        return Spec.unchunked(values.astype(np.float32), tensor)

    @staticmethod
    def chunked(tensor, layout):
        rows = np.arange(tensor.size, dtype=np.float32).reshape(layout["chunks"], -1)
        places = Spec.unchunked(rows, layout).flatten().astype(int)
        chunks = np.empty(tensor.size, tensor.dtype)
        chunks[places] = tensor.flatten()
        return chunks.reshape(rows.shape)

    @staticmethod
    def unchunked(rows, tensor):
        out = np.zeros(tensor["shape"], np.float32)
        if len(tensor["edges"]) == 1:
            return rows.reshape(tensor["shape"])
        height, width = tensor["edges"]
        across = tensor["shape"][1] // width
        for number, row in enumerate(rows):
            top, left = number // across * height, number % across * width
            out[top : top + height, left : left + width] = row.reshape(height, width)
        return out


class Judge:
    """Section 14 of docs/protocol.md, of the same second implementation."""

    INVALID = (
        "commit_mismatch",
        "malformed",
        "bad_signature",
        "wrong_identity",
        "wrong_network",
        "wrong_window",
        "wrong_assignment",
        "wrong_size",
        "wrong_hash",
        "wrong_shapes",
        "not_canonical",
        "bad_payload",
    )
    CONCLUSIVE = (
        *INVALID,
        "commit_missing",
        "commit_early",
        "commit_late",
        "time_unproven",
        "manifest_missing",
        "payload_missing",
        "reveal_early",
        "reveal_late",
        "wrong_version",
        "object_differs",
    )
    OF_ITS_BUCKET = (
        "access_denied",
        "bucket_missing",
        "bucket_unreadable",
        "commitment_missing",
        "commitment_malformed",
    )

    HELD_BACK = ("manifest_missing", "payload_missing", "reveal_early", "reveal_late", "object_differs")

    @staticmethod
    def fresh():
        averages = ("binary_average", "advantage", "own_excess", "sync", "final", "predicted_gain", "fruitless")
        unknown = ("uid", "registered_at", "last_reveal", "last_exact", "curvature", "excluded_until")
        card: dict[str, Any] = {"mu": 25.0, "sigma": 25 / 3, **dict.fromkeys(averages, 0.0)}
        return card | dict.fromkeys(unknown) | dict.fromkeys(("idle", "measured", "applied", "exclusions"), 0)

    @staticmethod
    def settled(value):
        return round(value, 10) + 0.0

    @staticmethod
    def plan(case):
        block_hash, miners = case["block_hash"], {int(uid): each for uid, each in case["miners"].items()}

        def key(uid):
            return "spare" if uid == -1 else miners[uid]["hotkey"]

        def drawn(size, name):
            ranked = sorted(range(size), key=lambda place: Spec.seed("templar.scoring.own", block_hash, name, place))
            return sorted(ranked[: case["num_sequences"]])

        def age(uid):
            bits = Spec.seed("templar.scoring.exact", block_hash, key(uid)) & (2**53 - 1)
            return -math.log((bits + 0.5) / 2**53) / miners[uid]["unmeasured"]

        order = sorted(miners, key=lambda uid: Spec.seed("templar.scoring.order", block_hash, key(uid)))
        sizes = {uid: miners[uid]["num_sequences"] for uid in order}
        segments = [[uid, drawn(sizes[uid], key(uid))] for uid in order if sizes[uid]]
        if len(segments) < 2 and case["num_spare"]:
            segments.append([-1, drawn(case["num_spare"], -1)])
        exact = []
        for uid in sorted(miners, key=age)[: case["exact_miners"]]:
            others = [other for other, _ in segments if other != uid]
            others.sort(key=lambda other: Spec.seed("templar.scoring.sample", block_hash, key(uid), key(other)))
            exact.append([uid, others[: case["exact_segments"]]])
        return segments, exact

    @staticmethod
    def places(payload, layout):
        """Where a payload has coefficients, of the tensors that do not publish whole chunks."""
        return {
            (tensor["name"], number, index)
            for tensor in layout["tensors"]
            if tensor["k"] < math.prod(tensor["edges"])
            for number, chunk in enumerate(payload["tensors"][tensor["name"]])
            for index, _, step in chunk
            if step
        }

    @staticmethod
    def chance(layout):
        sparse = [(each, math.prod(each["edges"])) for each in layout["tensors"]]
        sparse = [(each, n) for each, n in sparse if each["k"] < n]
        by_chance = sum(each["chunks"] * each["k"] * each["k"] / n for each, n in sparse)
        return by_chance / sum(each["chunks"] * each["k"] for each, _ in sparse)

    @staticmethod
    def share(mine, theirs, chance):
        overlap = len(mine & theirs) / max(1, len(mine))
        return min(1.0, max(0.0, (overlap - chance) / (1 - chance)))

    @staticmethod
    def most_alike(own, mine, others, chance, level):
        found = [(Judge.settled(Judge.share(mine, theirs, chance)), uid) for uid, theirs in others.items()]
        alike = sorted((uid != own, uid, share) for share, uid in found if share >= level)
        if alike:
            return {"uid": alike[0][1], "share": alike[0][2]}
        best = max(found, key=lambda each: (each[0], -each[1]), default=None)
        return None if best is None else {"uid": best[1], "share": best[0]}

    @staticmethod
    def improvement(before, after):
        if before is None or before <= 0:
            return 0.0
        return -1.0 if after is None else max(-1.0, (before - after) / before)

    @staticmethod
    def gain(before, gain):
        return Judge.improvement(before, None if before is None or gain is None else before - gain)

    @staticmethod
    def predicted_gain(exact):
        return Judge.gain(exact["random_before"], exact["random_gain"])

    @staticmethod
    def curvature(exact):
        if exact is None or not exact["random_before"] or exact["random_before"] < 0 or exact["random_gain"] is None:
            return None
        return Judge.improvement(exact["random_before"], exact["random_after"]) - Judge.predicted_gain(exact)

    @staticmethod
    def assumed(estimates, measurements, ratio):
        found = [
            (Judge.predicted_gain(each), c)
            for each in measurements
            if each and (c := Judge.curvature(each)) is not None
        ]
        if not found or not estimates:
            return {"typical": 0.0, "large": None, "shortfalls": [], "ratio": ratio}
        all_of_them = [Judge.gain(each["random_before"], each["random_gain"]) for each in estimates]
        large = ratio * max(0.0, statistics.median(all_of_them))
        broken = sorted(
            [predicted_gain, min(0.0, max(-1.0, c / predicted_gain))]
            for predicted_gain, c in found
            if predicted_gain > large
        )
        others = [c for predicted_gain, c in found if predicted_gain <= large]
        typical = min(0.0, statistics.median(others)) if others else 0.0
        return {"typical": typical, "large": large, "shortfalls": broken, "ratio": ratio}

    @staticmethod
    def left_out(linear, card, assumed):
        known: float | None = card["curvature"]
        past: float = assumed["typical"] if known is None else known
        if assumed["large"] is None or linear <= assumed["large"]:
            return past
        reach, predicted_gain = linear / assumed["ratio"], card["predicted_gain"]
        alike = [share for size, share in assumed["shortfalls"] if size >= reach]
        is_known = known is not None and predicted_gain >= reach
        limits = [past * (linear / predicted_gain) if is_known else past]
        if alike:
            limits.append(linear * statistics.median(alike))
        if not alike and not is_known:
            limits.append(assumed["large"] + assumed["typical"] - linear)
        return min(0.0, *limits)

    @staticmethod
    def score(linear, exact, card, assumed):
        own, random = (Judge.gain(linear[f"{which}_before"], linear[f"{which}_gain"]) for which in ("own", "random"))
        measured = Judge.curvature(exact)
        score = max(-1.0, random + (Judge.left_out(random, card, assumed) if measured is None else measured))
        if exact is not None:
            own, random = Judge.improvement(exact["own_before"], exact["own_after"]), score
            if exact["random_before"] is not None and exact["random_after"] is None:
                score = -1.0
        indicator = 1 if own - random > linear["expected"] and own > 0 and score > -1 else -1
        excess = max(min(own - random - linear["expected"], 1.0), -1.0)
        return Judge.settled(score), indicator, Judge.settled(excess)

    @staticmethod
    def rated(players, beta, tau):
        """Plackett-Luce: uid -> (score, mu, sigma) before, (mu, sigma) after."""
        variances = {uid: sigma**2 + tau**2 for uid, (_, _, sigma) in players.items()}
        c = math.sqrt(math.fsum(variance + beta**2 for variance in variances.values()))
        strength = {uid: math.exp(mu / c) for uid, (_, mu, _) in players.items()}
        scores = {uid: score for uid, (score, _, _) in players.items()}
        found = {}
        for uid, (score, mu, _) in players.items():
            omega = delta = 0.0
            for rival in (each for each in players if scores[each] >= score):
                not_better = math.fsum(strength[each] for each in players if scores[each] <= scores[rival])
                tied = sum(each == scores[rival] for each in scores.values())
                share = strength[uid] / not_better
                omega += ((rival == uid) - share) / tied
                delta += share * (1 - share) / tied
            shrink = 1 - delta * variances[uid] / c**2 * math.sqrt(variances[uid]) / c
            found[uid] = mu + omega * variances[uid] / c, math.sqrt(variances[uid] * max(shrink, 1e-4))
        return found

    @staticmethod
    def ratings(players, sigma, scoring):
        """Those of the miners, with the baseline at 25; the sigma and the score of the baseline."""
        if not players:
            return {}, sigma, 0.0
        middle = statistics.median(score for score, _, _ in players.values())
        least = Judge.settled(scoring["baseline_share"] * max(0.0, middle))
        everybody = players | {-1: (math.nextafter(least, 1.0), 25.0, sigma)}
        found = Judge.rated(everybody, scoring["openskill_beta"], scoring["openskill_tau"])
        zero, sigma = found.pop(-1)
        keep = 1 - scoring["rating_decay"]
        moved = {uid: (25 + keep * (mu - zero), own) for uid, (mu, own) in found.items()}
        return moved, Judge.settled(sigma), least

    @staticmethod
    def punished(card, events, scoring):
        """The card after penalties, in their order."""
        after = card
        for event, _ in events:
            after = Judge.slashed(after, scoring["slashing"][event])
        return after | ({"measured": card["measured"]} if Judge.shows_nothing(card, scoring) else {})

    @staticmethod
    def slashed(card, penalty):
        final, average = (
            Judge.settled(value * factor) if value > 0 else value
            for value, factor in ((card["final"], penalty["final"]), (card["binary_average"], penalty["average"]))
        )
        card = card | {"final": 0.0 if 0 < final < 1e-4 else final, "binary_average": average}
        if penalty["average"] == 0:
            card |= {"measured": 0}
        if penalty["reset"]:
            card |= {"last_reveal": None, "idle": 0, "measured": 0}
            card |= {name: min(0.0, card[name]) for name in ("advantage", "own_excess")}
            if card["mu"] - 3 * card["sigma"] >= 0:
                card |= {"mu": 25.0, "sigma": 25 / 3}
        return card

    @staticmethod
    def absent(facts, body):
        reason, tier = facts["reason"], facts["tier"]
        if facts["payload_sha256"] is not None or not facts["assigned"]:
            return False
        if reason in (None, "banned", "reader_failed", "commit_unseen"):
            return False
        if reason in Judge.INVALID:
            return True
        had_data = [each["facts"]["payload_sha256"] is not None for each in body["miners"] if each["facts"]["assigned"]]
        if reason not in Judge.CONCLUSIVE + Judge.OF_ITS_BUCKET and sum(had_data) <= len(had_data) / 2:
            return tier == "gather" and body["roster"] is not None
        return tier != "reserve" or reason in Judge.HELD_BACK

    @staticmethod
    def early(facts, card, body, banned, settings):
        found = []
        if card["uid"] is not None and card["uid"] != facts["uid"]:
            found.append(("registered_again", "registered_again"))
        if banned:
            found.append(("banned", "banned"))
        if card["last_reveal"] is not None and Judge.absent(facts, body):
            if card["idle"] + 1 > settings["scoring"]["reset_inactivity_windows"]:
                found.append(("inactivity_reset", "inactive"))
            elif card["idle"] + 1 > settings["peers"]["recent_windows"]:
                found.append(("inactivity", "inactive"))
        return found

    @staticmethod
    def absence(facts, body, low_rate, inactive):
        reason = facts["reason"]
        if not Judge.absent(facts, body) or (inactive and reason not in Judge.INVALID):
            return []
        if reason in Judge.INVALID:
            return [("invalid", reason)]
        gather = [each["facts"] for each in body["miners"] if each["facts"]["tier"] == "gather"]
        gather = [each for each in gather if each["reason"] is None or each["reason"] in Judge.CONCLUSIVE]
        succeeded = sum(each["payload_sha256"] is not None for each in gather)
        low = bool(gather) and succeeded / len(gather) < low_rate
        return [("missing_low_success" if low else "missing", reason)]

    @staticmethod
    def shows_nothing(card, scoring):
        return (
            card["measured"] >= scoring["own_data_windows"] and card["binary_average"] < scoring["own_data_min_average"]
        )

    @staticmethod
    def late(facts, card, body, scoring):
        """With the card after the early penalties."""
        found, exact = [], facts["measurement"]
        if facts["estimate"] is not None and Judge.shows_nothing(card, scoring):
            found.append(("unassigned_data", "own_data_unlearnt"))
        pairs = [(exact[f"{which}_before"], exact[f"{which}_after"]) for which in ("own", "random")] if exact else []
        if any(before is not None and after is None for before, after in pairs):
            found.append(("invalid", "non_finite_loss"))
        if facts["windows_behind"] is not None and facts["windows_behind"] > scoring["sync_max_steps_behind"]:
            found.append(("desync", "desync"))
        if facts["norm_ratio"] is not None and facts["norm_ratio"] > scoring["oversized_ratio"]:
            found.append(("oversized", "oversized"))
        return found

    @staticmethod
    def scored(facts, card, score, rating, scoring, *, gained, excess):
        """The card of a miner that was scored, but for `last_reveal` and `final`."""
        alpha = scoring["binary_score_ma_alpha"]
        mu, sigma = map(Judge.settled, rating)
        average = Judge.settled((1 - alpha) * card["binary_average"] + alpha * score[1])
        behind = facts["windows_behind"]
        sync = Judge.settled(card["sync"] if behind is None else (1 - min(behind, 5) / 5) ** 2.5)
        advantage = Judge.settled((1 - alpha) * card["advantage"] + alpha * gained)
        card = card | {"mu": mu, "sigma": sigma, "binary_average": average, "sync": sync}
        card |= {"measured": card["measured"] + 1, "advantage": advantage}
        card |= {"own_excess": Judge.settled((1 - alpha) * card["own_excess"] + alpha * excess)}
        curvature = Judge.curvature(facts["measurement"])
        if curvature is not None:
            beta = 1.0 if card["curvature"] is None else scoring["curvature_ma_alpha"]
            for field, newest in (
                ("curvature", curvature),
                ("predicted_gain", Judge.predicted_gain(facts["measurement"])),
            ):
                card |= {field: Judge.settled((1 - beta) * (card[field] or 0.0) + beta * newest)}
        return card

    @staticmethod
    def typical(values):
        positive = [value for value in values if value > 0]
        return Judge.settled(statistics.median(positive)) if positive else 0.0

    @staticmethod
    def finals(cards, baseline_sigma, typical, typical_excess, settings):
        """Of the miners that were scored, with their cards after the window."""
        found, median_skill, rule = {}, settings["scoring"]["median_skill"], settings["weights"]
        for uid, card in cards.items():
            skill = (card["mu"] - 3 * card["sigma"]) - (25 - 3 * baseline_sigma)
            if card["advantage"] <= 0:
                skill = min(skill, 0.0)
            elif rule["rule"] == "value":
                share, backed = card["advantage"] / typical, 1.0
                if typical_excess > 0:
                    backed = max(0.0, min(1.0, card["own_excess"] / typical_excess / share))
                skill = median_skill * share ** rule["value_exponent"] * backed ** rule.get("own_data_exponent", 1.0)
            else:
                skill = min(max(skill, 1.0), median_skill * card["advantage"] / typical)
            found[uid] = Judge.settled(skill * max(0.0, card["binary_average"]) * card["sync"])
        return found

    @staticmethod
    def fruitless(own, gained):
        """What a window counts against a miner, from its advantage and those of the miners whose average is above 0."""
        if own > 0 or not gained or (middle := statistics.median(gained)) <= 0:
            return 0.0
        spread = 3 * statistics.median(abs(each - middle) for each in gained)
        clear = 1.0 if spread <= middle else Judge.settled((middle / spread) ** 2)
        return Judge.settled(clear * (2.0 if own <= -middle else 1 - own / middle))

    @staticmethod
    def place(card, counted, window, scoring):
        """The fields of a scored miner's card that say whether it may be in the gather tier."""
        until, times = card["excluded_until"], card["exclusions"]
        if card["advantage"] > 0:
            return {"fruitless": 0.0, "excluded_until": until if until is not None and window < until else None}
        if until is not None:
            return {"fruitless": 0.0}
        fruitless = Judge.settled(card["fruitless"] + counted)
        if fruitless < scoring["exclusion_after"]:
            return {"fruitless": fruitless}
        until = window + scoring["exclusion_windows"] * 2 ** min(times, 10)
        return {"fruitless": 0.0, "exclusions": times + 1, "excluded_until": until}

    @staticmethod
    def scores(facts, cards, scoring):
        estimates = [each["estimate"] for each in facts.values() if each["estimate"] is not None]
        measurements = [each["measurement"] for each in facts.values()]
        assumed = Judge.assumed(estimates, measurements, scoring["large_prediction_ratio"])
        found = {
            uid: Judge.score(each["estimate"], each["measurement"], cards[uid], assumed)
            for uid, each in facts.items()
            if each["estimate"] is not None
        }
        parts, scores = Judge.parts({uid: facts[uid] for uid in found}, cards, scoring), {}
        for uid, (score, indicator, excess) in found.items():
            counted = min(score, 0.0) if Judge.shows_nothing(cards[uid], scoring) else score
            if counted > 0 and uid in parts:
                counted = Judge.settled(counted / parts[uid][0]) if parts[uid][0] else 0.0
            scores[uid] = counted, indicator, Judge.settled(excess * facts[uid]["sequences"])
        return scores

    @staticmethod
    def parts(facts, cards, scoring):
        """Among how many the score of each discounted payload is divided, 0 if it counts for nobody, and why."""
        sound = {
            uid
            for uid in facts
            if cards[uid]["measured"] >= scoring["own_data_windows"] and not Judge.shows_nothing(cards[uid], scoring)
        }
        links = {uid: {uid} for uid in facts}
        for uid, each in facts.items():
            if Judge.alike(each["overlap"], scoring) and each["overlap"]["uid"] in facts:
                links[uid].add(each["overlap"]["uid"])
                links[each["overlap"]["uid"]].add(uid)
        found = {}
        for uid, each in facts.items():
            group: set[int] = {uid}
            while (wider := set().union(*(links[member] for member in group))) != group:
                group = wider
            young = cards[uid]["applied"] < scoring["overlap_grace_windows"]
            level = scoring["overlap_copy_level"] if young else scoring["overlap_level"]
            linked, again = (each[name] is not None and each[name]["share"] >= level for name in ("overlap", "repeat"))
            most = max((cards[member]["binary_average"] for member in group & sound), default=0.0)
            sharing = {member for member in group & sound if cards[member]["binary_average"] * 2 >= most}
            parts = len(sharing) if uid in sharing else 0
            if len(group) > 1 and linked and parts != 1:
                found[uid] = parts, "index_overlap"
            if again and (each["repeat"]["uid"] == uid or uid not in sound):
                found[uid] = 0, "repeated_payload"
        return found

    @staticmethod
    def alike(likeness, scoring):
        return likeness is not None and likeness["share"] >= scoring["overlap_level"]

    @staticmethod
    def bans_after(body, bans, slashes, penalties):
        found = {subject: last for subject, last in bans.items() if last > body["window"]}
        everybody = [record["facts"] for record in body["miners"]]
        for facts in everybody:
            length = max((penalties[event]["ban_windows"] for event, _ in slashes[facts["uid"]]), default=0)
            shared = [each["bucket"] for each in everybody].count(facts["bucket"]) > 1
            for subject in (facts["hotkey"], None if shared else facts["bucket"]):
                if length and subject is not None:
                    found[subject] = max(found.get(subject, 0), body["window"] + length)
        return [{"subject": subject, "last_window": found[subject]} for subject in sorted(found)]

    @staticmethod
    def conclude(body, before, settings):
        """All of a body that is not facts, from its facts and the body before."""
        scoring, window = settings["scoring"], body["window"]
        penalties, facts = scoring["slashing"], {each["facts"]["uid"]: each["facts"] for each in body["miners"]}
        before = before or {"departed": [], "miners": [], "bans": [], "baseline_sigma": 25 / 3}
        known, bans = Judge.memory(before, list(facts.values()))
        first = {uid: known.get(each["hotkey"], Judge.fresh()) for uid, each in facts.items()}
        cards, slashes = {}, {}
        for uid, each in facts.items():
            banned = any(bans.get(subject, -1) >= window for subject in (each["hotkey"], each["bucket"]))
            slashes[uid] = Judge.early(each, first[uid], body, banned, settings)
            seat = {"uid": uid, "registered_at": each["registered_at"]}
            cards[uid] = Judge.punished(first[uid], slashes[uid], scoring) | seat
        early, scores = dict(cards), Judge.scores(facts, cards, scoring)
        parts = Judge.parts({uid: facts[uid] for uid in scores}, cards, scoring)
        players = {uid: (score, cards[uid]["mu"], cards[uid]["sigma"]) for uid, (score, _, _) in scores.items()}
        ratings, baseline_sigma, least = Judge.ratings(players, before["baseline_sigma"], scoring)
        most = scoring["advantage_cap"] * Judge.typical(score for score, _, _ in scores.values())
        most_excess = scoring["advantage_cap"] * Judge.typical(excess for _, _, excess in scores.values())
        gains = {uid: min(score[0], most) - least for uid, score in scores.items()}
        for uid, each in scores.items():
            gained, excess = gains[uid], min(each[2], most_excess)
            cards[uid] = Judge.scored(facts[uid], cards[uid], each, ratings[uid], scoring, gained=gained, excess=excess)
            cards[uid] |= {"last_reveal": window}
            if Judge.curvature(facts[uid]["measurement"]) is not None:
                cards[uid] |= {"last_exact": window}
        typical = Judge.typical(cards[uid]["advantage"] for uid in scores)
        typical_excess = Judge.typical(cards[uid]["own_excess"] for uid in scores if cards[uid]["advantage"] > 0)
        finals = Judge.finals({uid: cards[uid] for uid in scores}, baseline_sigma, typical, typical_excess, settings)
        earned = [gains[uid] for uid in scores if cards[uid]["advantage"] > 0]
        for uid, final in finals.items():
            counted = Judge.fruitless(gains[uid], earned)
            cards[uid] |= {"final": final} | Judge.place(cards[uid], counted, window, scoring)
        for uid, each in facts.items():
            inactive = any(reason == "inactive" for _, reason in slashes[uid])
            late = Judge.absence(each, body, scoring["low_success_rate"], inactive)
            late += Judge.late(each, early[uid], body, scoring)
            slashes[uid] += late
            idle = 0 if each["payload_sha256"] is not None else cards[uid]["idle"] + Judge.absent(each, body)
            applied = cards[uid]["applied"] + each["applied"]
            cards[uid] = Judge.punished(cards[uid] | {"idle": idle, "applied": applied}, late, scoring)
        weights = Judge.weights({uid: card["final"] for uid, card in cards.items()}, settings)
        return {
            "baseline_sigma": baseline_sigma,
            "typical_advantage": typical,
            "typical_own_excess": typical_excess,
            "miners": [
                {
                    "facts": facts[uid],
                    "before": first[uid],
                    **Judge.judged(facts[uid], scores.get(uid), parts.get(uid), scoring),
                    "slashes": [{"event": event, "reason": reason} for event, reason in slashes[uid]],
                    "after": cards[uid],
                }
                for uid in sorted(facts)
            ],
            "departed": Judge.departed(known, {each["hotkey"] for each in facts.values()}),
            "bans": Judge.bans_after(body, bans, slashes, penalties),
            "weights": [{"uid": uid, "weight": weight} for uid, weight in weights.items()],
        }

    @staticmethod
    def memory(before, everybody):
        """The cards and bans of the body before, under the hotkeys of now."""
        known = {each["hotkey"]: each["card"] for each in before["departed"]}
        known |= {each["facts"]["hotkey"]: each["after"] for each in before["miners"]}
        return Judge.swapped(known, {each["subject"]: each["last_window"] for each in before["bans"]}, everybody)

    @staticmethod
    def swapped(known, bans, everybody):
        """Cards and bans, with those of a swapped hotkey under the new one."""
        new = {(each["uid"], each["registered_at"]): each["hotkey"] for each in everybody}
        cards, held = {}, dict(bans)
        for renamed in (False, True):  # what comes to a hotkey with its place replaces what it had before
            for old, card in known.items():
                now = new.get((card["uid"], card["registered_at"]), old)
                if (now != old) is renamed:
                    cards[now] = card
                    if renamed and old in bans:
                        held[now] = max(bans[old], bans.get(now, 0))
        return cards, held

    @staticmethod
    def departed(known, present):
        """The cards of miners that are not there any more; of many those that revealed last."""
        gone = known.keys() - present
        kept = sorted(gone, key=lambda hotkey: (-(known[hotkey]["last_reveal"] or 0), hotkey))[:512]
        return [{"hotkey": hotkey, "card": known[hotkey]} for hotkey in sorted(kept)]

    @staticmethod
    def judged(facts, score, part, scoring):
        """What a window says of a payload; None where it was not scored."""
        return {
            "gradient_score": None if score is None else score[0],
            "indicator": None if score is None else score[1],
            "copied": any(Judge.alike(facts[name], scoring) for name in ("overlap", "repeat")),
            "discount": None if part is None else part[1],
        }

    @staticmethod
    def weights(finals, settings):
        rule, peers = settings["weights"], settings["peers"]
        burn_uid, burn_rate = rule["burn_uid"], rule["burn_rate"]
        earning = {uid: final for uid, final in finals.items() if final > 0 and uid != burn_uid}
        if rule["rule"] == "value":
            shares = dict(earning)
        elif rule["rule"] == "power":
            shares = {uid: final ** rule["power_normalisation"] for uid, final in earning.items()}
        else:
            shares = Judge.ramp(earning, rule, peers)
        total = math.fsum(shares.values())
        shares = {uid: share / total * (1 - burn_rate) for uid, share in shares.items()} if total else {}
        if burn_uid is not None:
            shares |= {burn_uid: burn_rate if total else 1.0}
        rounded = {uid: round(shares[uid], 10) for uid in sorted(shares)}
        return {uid: share for uid, share in rounded.items() if share > 0}

    @staticmethod
    def ramp(finals, rule, peers):
        ranked = sorted(finals, key=lambda uid: -finals[uid])
        first, second = (min(len(ranked), peers["gather_peer_count"]), peers["reserve_peer_count"])
        high, ratio = rule["gather_top_ratio"], rule["reserve_decay_ratio"]
        line = [high + (1 - high) * place / max(1, first - 1) for place in range(first)]
        places = [value / sum(line) * rule["gather_share"] for value in line]
        decay = [ratio**place for place in range(min(second, len(ranked) - first))]
        tail = [value / sum(decay) * (1 - rule["gather_share"]) for value in decay]
        if tail and tail[0] > places[-1]:
            tail = [value * places[-1] / tail[0] * ratio for value in tail]
        places += tail + [0.0] * (len(ranked) - first - len(tail))
        shares = {}
        for score in finals.values():
            tied = [place for place, uid in enumerate(ranked) if finals[uid] == score]
            mean = math.fsum(places[place] for place in tied) / len(tied)
            shares |= {ranked[place]: mean for place in tied}
        return shares
