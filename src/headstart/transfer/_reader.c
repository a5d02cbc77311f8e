/* Reads and verifies a batch of requests without the interpreter: `batch.py` fills the tables, several threads call `work`.

   Promises: at most one request a thread is in flight; a piece is counted only after its check was right; a request that could
   not be read, or whose check differs, or that is no longer wanted as a whole, is handed back and nothing is said about it.
   What another library brings, chunk by chunk, `headstart_take` puts in its place, and says how much of it is right.
   Leaves to Python: headers that are not exactly as expected, what is read, what a failure means, who is told. No Python.h: one
   build serves every interpreter, and the hash is the one that the xxhash package brings, called by address. */

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { ALIGNMENT = 4096, MAX_ROWS = 1024, PREFIX_BYTES = 68 };
enum { WAIT_NS = 100000, WAITS = 50 };          /* 5 ms at most */
/* What `work` returns, and `settle`. */
enum { NONE_LEFT, LAYER_ENDED, HANDED_BACK, TIME_IS_UP, HEAD_READ, HEAD_WRONG, NOT_YET, NO_MEMORY };
enum { GOOD = 1, ENDED = 2 };
enum { UNKNOWN, KNOWN, PORTABLE };              /* an extent's header: not read yet, right, or none of this reader's business */

typedef struct { uint64_t low, high; } Hash;

typedef struct {            /* piece p of a layer goes to address + p * piece_stride, as `rows` rows */
    uint8_t *address;
    int64_t piece_bytes, piece_stride, rows, row_bytes, row_stride;
    int64_t direct;         /* every row's address and length suit direct I/O */
} Layer;

typedef struct { int64_t offset; int32_t layer, start, pieces, unused; } Part;      /* offset: in the file */

/* `head_bytes` from `offset` on go to the thread's staging, and its parts are verified when the header is known, by `settle`. */

typedef struct {
    int64_t offset;
    int32_t descriptor, head_bytes, first_part, parts, start, pieces, extent, unused;
} Request;

typedef struct {            /* what its header must say, as docs/format.md lays it down */
    const uint8_t *model;       /* the header of an extent of that length, of other blocks */
    int32_t layer_table, keys, tokens, checks;      /* where in it they begin */
    int32_t pieces, first, wanted, start;           /* in pieces: all of them, and those that are wanted */
} Extent;

typedef struct {
    const Layer *layers;
    const Part *parts;
    const Extent *extents;
    const Request *requests;
    int64_t request_count, piece_count, layer_count, blocks_per_piece;
    int32_t *states;            /* [extents] of their headers */
    const uint8_t *digest;      /* 32 bytes */
    const uint8_t *keys;        /* [blocks][32] of the prompt */
    const uint8_t *tokens;      /* [blocks][64 * 4] */
    uint8_t *checks;            /* [layers][pieces][16] */
    int64_t *left;              /* [layers] requests that have not ended */
    int64_t *pieces_ended;      /* [layers] by this reader; read once `left` is 0 */
    int64_t *bytes_read;        /* [layers] */
    const int64_t *limit;       /* pieces from here on are not wanted any more */
    const int64_t *cancelled;   /* not 0: hand everything back */
    const int64_t *closing;     /* not 0: hand everything back */
    const int64_t *waiting;     /* not 0: somebody else wants the thread */
    int64_t until_ns;           /* by the monotonic clock: what is read later is handed back */
    int64_t next;
    int64_t laid_out;           /* requests that may be taken: the heads first, all once `headstart_go_on` says so */
    void *(*create)(void);
    int (*release)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    Hash (*digest_of)(const void *);
} Batch;

typedef struct {            /* how far a stream has come whose bytes belong to `parts`, in the order of their offsets */
    const Part *parts;
    int64_t count;
    int32_t *right;             /* [parts] so many pieces of each, from its first one on, are what was written */
    int64_t at;                 /* the offset of the next byte that comes */
    int64_t part, filled;       /* what is being filled, and how many bytes of it are there */
} Coming;

/* `native.py` has the same numbers, and uses no reader that has others: one of another headstart, left behind by an update, would
   take its tables for something else. The first is raised with every change of meaning that the sizes do not show. */
const int64_t headstart_layout[] = {4, sizeof(Layer), sizeof(Part), sizeof(Request), sizeof(Extent), sizeof(Batch),
                                    offsetof(Batch, next), sizeof(Coming)};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void canonical(Hash hash, uint8_t out[16])
{
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(hash.high >> (56 - 8 * i));
        out[8 + i] = (uint8_t)(hash.low >> (56 - 8 * i));
    }
}

/* Add where the rows of a part lie in the destination, neighbours joined; returns how many there are, -1: too many. */
static int rows_of(const Layer *layer, const Part *part, struct iovec *rows, int count)
{
    for (int64_t piece = part->start; piece < (int64_t)part->start + part->pieces; piece++)
        for (int64_t row = 0; row < layer->rows; row++) {
            uint8_t *at = layer->address + piece * layer->piece_stride + row * layer->row_stride;
            if (count && (uint8_t *)rows[count - 1].iov_base + rows[count - 1].iov_len == at) {
                rows[count - 1].iov_len += (size_t)layer->row_bytes;
                continue;
            }
            if (count == MAX_ROWS)
                return -1;
            rows[count++] = (struct iovec){at, (size_t)layer->row_bytes};
        }
    return count;
}

static int read_exactly(int descriptor, const struct iovec *into, int count, int64_t nbytes, int64_t offset)
{
    ssize_t got;
    do
        got = preadv(descriptor, into, count, (off_t)offset);
    while (got < 0 && errno == EINTR);
    return got == nbytes;
}

/* Check a piece, at `staged` or else where it lies in the destination. */
static int is_right(const Batch *b, void *state, int32_t number, int64_t piece, const uint8_t *staged)
{
    const Layer *layer = &b->layers[number];
    uint8_t prefix[PREFIX_BYTES], check[16];
    memcpy(prefix, b->digest, 32);
    memcpy(prefix + 32, b->keys + ((piece + 1) * b->blocks_per_piece - 1) * 32, 32);
    for (int i = 0; i < 4; i++)
        prefix[64 + i] = (uint8_t)((uint32_t)number >> (8 * i));
    b->reset(state);
    b->update(state, prefix, PREFIX_BYTES);
    if (staged)
        b->update(state, staged, (size_t)layer->piece_bytes);
    else
        for (int64_t row = 0; row < layer->rows; row++) {
            const uint8_t *at = layer->address + piece * layer->piece_stride + row * layer->row_stride;
            b->update(state, at, (size_t)layer->row_bytes);
        }
    canonical(b->digest_of(state), check);
    return !memcmp(check, b->checks + (number * b->piece_count + piece) * 16, 16);
}

/* The same of every piece of a part. */
static int verify(const Batch *b, void *state, const Part *part, const uint8_t *staged)
{
    for (int64_t i = 0; i < part->pieces; i++)
        if (!is_right(b, state, part->layer, part->start + i, staged ? staged + i * b->layers[part->layer].piece_bytes : 0))
            return 0;
    return 1;
}

static void copy_out(const Layer *layer, const Part *part, const uint8_t *from)
{
    for (int64_t piece = part->start; piece < (int64_t)part->start + part->pieces; piece++)
        for (int64_t row = 0; row < layer->rows; row++, from += layer->row_bytes)
            memcpy(layer->address + piece * layer->piece_stride + row * layer->row_stride, from, (size_t)layer->row_bytes);
}

/* The bytes in front of a request in staging that direct I/O brings along; -1 if it goes straight into its destination. */
static int plan(const Batch *b, const Request *request, uint8_t *staging, struct iovec *rows, int *count)
{
    int64_t end = request->offset + request->head_bytes;
    int direct = request->offset % ALIGNMENT == 0 && request->head_bytes % ALIGNMENT == 0;
    *count = 0;
    if (request->head_bytes)
        rows[(*count)++] = (struct iovec){staging, (size_t)request->head_bytes};
    for (int i = 0; i < request->parts && direct; i++) {
        const Part *part = &b->parts[request->first_part + i];
        const Layer *layer = &b->layers[part->layer];
        direct = layer->direct && part->offset == end && (*count = rows_of(layer, part, rows, *count)) >= 0;
        end = part->offset + part->pieces * layer->piece_bytes;
    }
    return direct ? -1 : (int)(request->offset % ALIGNMENT);
}

static int64_t end_of(const Batch *b, const Request *request)
{
    if (!request->parts)
        return request->offset + request->head_bytes;
    const Part *last = &b->parts[request->first_part + request->parts - 1];
    return last->offset + last->pieces * b->layers[last->layer].piece_bytes;
}

static int fetch(const Batch *b, const Request *request, uint8_t *staging, int64_t staging_bytes)
{
    struct iovec rows[MAX_ROWS];
    int count, before = plan(b, request, staging, rows, &count);
    int64_t nbytes = end_of(b, request) - request->offset;
    if (before < 0)
        return read_exactly(request->descriptor, rows, count, nbytes, request->offset);
    nbytes = (before + nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct iovec whole = {staging, (size_t)nbytes};
    return nbytes <= staging_bytes && read_exactly(request->descriptor, &whole, 1, nbytes, request->offset - before);
}

/* Verify what `fetch` has read, and move it to its destination if it is not there; 1 only if every byte is right. */
static int keep(const Batch *b, const Request *request, void *state, uint8_t *staging)
{
    struct iovec rows[MAX_ROWS];
    int count, before = plan(b, request, staging, rows, &count);
    const Part *parts = &b->parts[request->first_part];
    for (int i = 0; i < request->parts; i++)
        if (!verify(b, state, &parts[i], before < 0 ? 0 : staging + before + (parts[i].offset - request->offset)))
            return 0;
    for (int i = 0; before >= 0 && i < request->parts; i++)
        copy_out(&b->layers[parts[i].layer], &parts[i], staging + before + (parts[i].offset - request->offset));
    return 1;
}

/* Whether a header is right, and its extent the one that is wanted; then its checks are taken over. 0: Python looks at it. */
static int take_header(const Batch *b, const Request *request, void *state, const uint8_t *header)
{
    const Extent *e = &b->extents[request->extent];
    const uint8_t *model = e->model;
    int64_t blocks = b->blocks_per_piece;
    uint8_t check[16];
    if (!model)
        return 0;
    b->reset(state);
    b->update(state, header, 16);
    b->update(state, header + 32, (size_t)request->head_bytes - 32);
    canonical(b->digest_of(state), check);
    if (memcmp(check, header + 16, 16) || (header[62] + 256 * header[63] + 7) / 8 * 8 != e->layer_table - 176)
        return 0;
    const struct { const uint8_t *want; int64_t at, nbytes; } same[] = {
        {model, 0, 16},                         /* magic, version, header bytes */
        {model + 33, 33, 29},                   /* flags, blocks, extent bytes, sizes, layers, algorithm */
        {model + 64, 64, 16},                   /* no boundary state */
        {model + 108, 108, 36},                 /* no check key, representation */
        {model + e->layer_table, e->layer_table, 8 * b->layer_count},
        {b->keys + e->start * blocks * 32, e->keys + e->first * blocks * 32, e->wanted * blocks * 32},
        {b->tokens + e->start * blocks * 256, e->tokens + e->first * blocks * 256, e->wanted * blocks * 256},
    };
    for (unsigned i = 0; i < sizeof same / sizeof *same; i++)
        if (memcmp(header + same[i].at, same[i].want, (size_t)same[i].nbytes))
            return 0;
    if ((header[32] ^ model[32]) & ~1)          /* the first flag: extras, which only follow what is needed here */
        return 0;
    for (int64_t layer = 0; layer < b->layer_count; layer++)
        memcpy(b->checks + (layer * b->piece_count + e->start) * 16, header + e->checks + (layer * e->pieces + e->first) * 16,
               (size_t)e->wanted * 16);
    return 1;
}

/* A request has ended: `ended` counts its pieces as told by this reader, `read` its bytes. Returns if a layer has ended by it. */
static int count_down(Batch *b, const Request *request, int ended, int read)
{
    int last = 0;
    for (int i = 0; i < request->parts; i++) {
        const Part *part = &b->parts[request->first_part + i];
        if (ended)
            __atomic_fetch_add(&b->pieces_ended[part->layer], part->pieces, __ATOMIC_RELAXED);
        if (read)
            __atomic_fetch_add(&b->bytes_read[part->layer], part->pieces * b->layers[part->layer].piece_bytes,
                               __ATOMIC_RELAXED);
        last |= __atomic_fetch_sub(&b->left[part->layer], 1, __ATOMIC_ACQ_REL) == 1;
    }
    return last;
}

static int settle(Batch *b, const Request *request, void *state, uint8_t *staging, int header)
{
    int good = header == KNOWN && state && keep(b, request, state, staging);
    __atomic_store_n(&b->states[request->extent], header, __ATOMIC_RELEASE);
    return (good ? GOOD : 0) | (count_down(b, request, good, good) ? ENDED : 0);
}

static int is_late(const Batch *b)
{
    return now_ns() > b->until_ns;
}

static int is_over(const Batch *b)
{
    return __atomic_load_n(b->cancelled, __ATOMIC_ACQUIRE) || __atomic_load_n(b->closing, __ATOMIC_ACQUIRE);
}

/* Wait until a request may be read, but not for long, nor once nothing is to be read any more, and return what is known of the header of its extent. Its head was taken
   before, by a thread that most often is just reading it: then it is known before a turn through Python would be over. And layer
   0 is alone on the device until it has ended: whoever waits for it waits for nothing else. */
static int await_turn(const Batch *b, const Request *request)
{
    const struct timespec pause = {0, WAIT_NS};
    for (int i = 0;; i++) {
        int header = __atomic_load_n(&b->states[request->extent], __ATOMIC_ACQUIRE);
        int early = b->parts[request->first_part].layer && __atomic_load_n(&b->left[0], __ATOMIC_ACQUIRE);
        if ((header != UNKNOWN && !early) || i == WAITS || is_over(b))
            return header;
        nanosleep(&pause, 0);
    }
}

/* Return the number of the next request, `request_count` where none is left, -1 where the rest is not laid out yet. */
static int64_t take_next(Batch *b)
{
    int64_t next = __atomic_load_n(&b->next, __ATOMIC_RELAXED), count;
    do {
        count = __atomic_load_n(&b->request_count, __ATOMIC_RELAXED);
        if (next >= count)
            return count;
        if (next >= __atomic_load_n(&b->laid_out, __ATOMIC_ACQUIRE))
            return -1;
    } while (!__atomic_compare_exchange_n(&b->next, &next, next + 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return next;
}

/* The same, but wait for it, not for long. */
static int64_t await_next(Batch *b)
{
    const struct timespec pause = {0, WAIT_NS};
    int64_t next;
    for (int i = 0; (next = take_next(b)) < 0 && i < WAITS; i++)
        nanosleep(&pause, 0);
    return next;
}

void headstart_go_on(Batch *b)
{
    __atomic_store_n(&b->laid_out, b->request_count, __ATOMIC_RELEASE);
}

static int is_up(const Batch *b, int64_t began, int64_t budget_ns, int64_t alone_ns)
{
    int64_t took = now_ns() - began;
    return took >= alone_ns || (took >= budget_ns && __atomic_load_n(b->waiting, __ATOMIC_RELAXED));
}

/* Take requests in order until something is to be done in Python with one of them (`*number`), a layer has ended, or time is up:
   `budget_ns` where somebody waits for the thread, else `alone_ns`. `*number` on entry: a request to do first, -1: none.
   HEAD_READ: it is not counted yet, `headstart_settle` follows; HEAD_WRONG: it is counted, but for the pieces of layer 0, which
   are not right. */
int headstart_work(Batch *b, uint8_t *staging, int64_t staging_bytes, int64_t budget_ns, int64_t alone_ns, int64_t *number)
{
    int64_t began = now_ns(), next = *number;
    int outcome = NONE_LEFT;
    void *state = b->create();
    if (!state)
        return NO_MEMORY;
    for (*number = -1; outcome == NONE_LEFT; next = -1) {
        if (next < 0)
            next = await_next(b);
        if (next < 0) {
            outcome = TIME_IS_UP;
            break;
        }
        if (next >= __atomic_load_n(&b->request_count, __ATOMIC_RELAXED))
            break;
        const Request *request = &b->requests[next];
        int header = request->head_bytes ? KNOWN : await_turn(b, request);
        int64_t limit = __atomic_load_n(b->limit, __ATOMIC_ACQUIRE);
        if (header == UNKNOWN) {
            outcome = NOT_YET;      /* whatever else is so: who settles the head may yet take the whole extent out */
        } else if (header == PORTABLE || request->start >= limit) {
            if (request->head_bytes)        /* the extent is not wanted at all, nor will it be */
                __atomic_store_n(&b->states[request->extent], KNOWN, __ATOMIC_RELEASE);
            if (count_down(b, request, header != PORTABLE, 0))
                outcome = LAYER_ENDED;
        } else if (is_over(b) || is_late(b)) {
            outcome = HANDED_BACK;
        } else if (request->start + request->pieces > limit || !fetch(b, request, staging, staging_bytes) || is_late(b)) {
            outcome = HANDED_BACK;
        } else if (request->head_bytes) {
            outcome = HEAD_READ;
            if (take_header(b, request, state, staging + request->offset % ALIGNMENT)) {
                int found = settle(b, request, state, staging, KNOWN);
                outcome = found & GOOD ? (found & ENDED ? LAYER_ENDED : NONE_LEFT) : HEAD_WRONG;
            }
        } else if (!keep(b, request, state, staging)) {
            outcome = HANDED_BACK;
        } else if (count_down(b, request, 1, 1))
            outcome = LAYER_ENDED;
        if (outcome == HANDED_BACK || outcome == HEAD_READ || outcome == HEAD_WRONG || outcome == NOT_YET)
            *number = next;
        if (outcome == HANDED_BACK && !request->head_bytes)
            count_down(b, request, 0, 0);
        if (outcome == NONE_LEFT && is_up(b, began, budget_ns, alone_ns))
            outcome = TIME_IS_UP;
    }
    b->release(state);
    return outcome;
}

/* Say what a head's header is, KNOWN (its checks are in the table then) or PORTABLE, and count the request. Returns GOOD if KNOWN
   and the pieces that were read with it are right, with ENDED if layer 0 has ended. */
int headstart_settle(Batch *b, int64_t number, uint8_t *staging, int header)
{
    void *state = header == KNOWN ? b->create() : 0;
    int found = settle(b, &b->requests[number], state, staging, header);
    if (state)
        b->release(state);
    return found;
}

/* Copy what is not read again soon, past the caches: the memory that it goes to is not fetched before it is overwritten. Others
   see it after `pass`. */
static void copy_past(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    int64_t done = 0;
#ifdef __SSE2__
    for (; (uintptr_t)to % 64 == 0 && nbytes - done >= 64; done += 64) {
        __m128i line[4];
        for (int i = 0; i < 4; i++)
            line[i] = _mm_loadu_si128((const __m128i *)(from + done) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(to + done) + i, line[i]);
    }
#endif
    memcpy(to + done, from + done, (size_t)(nbytes - done));
}

static void pass(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Copy a chunk that comes next to where its bytes belong, and check every piece that is whole by it: where it came, if all of it
   came at once, else where it belongs. What lies between parts is passed over. Of the batch only the tables of pieces are used:
   `layers`, `keys`, `checks` and what belongs to them. Returns how many parts are there by now, -1 where there is no memory. */
int64_t headstart_take(const Batch *b, Coming *c, const uint8_t *bytes, int64_t nbytes)
{
    void *state = b->create();
    if (!state)
        return -1;
    while (nbytes && c->part < c->count) {
        const Part *part = &c->parts[c->part];
        const Layer *layer = &b->layers[part->layer];
        int64_t gap = part->offset + c->filled - c->at, n = gap < nbytes ? gap : nbytes;
        if (gap <= 0 && c->filled % layer->piece_bytes == 0 && layer->piece_bytes <= nbytes) {
            int64_t piece = part->start + c->filled / layer->piece_bytes;
            n = layer->piece_bytes;
            if (c->right[c->part] == piece - part->start)
                c->right[c->part] += is_right(b, state, part->layer, piece, bytes);
            for (int64_t row = 0; row < layer->rows; row++)
                copy_past(layer->address + piece * layer->piece_stride + row * layer->row_stride, bytes + row * layer->row_bytes,
                          layer->row_bytes);
            c->filled += n;
        } else if (gap <= 0) {
            int64_t piece = c->filled / layer->piece_bytes, within = c->filled % layer->piece_bytes;
            int64_t row = within / layer->row_bytes, column = within % layer->row_bytes;
            uint8_t *to = layer->address + (part->start + piece) * layer->piece_stride + row * layer->row_stride + column;
            n = layer->row_bytes - column < nbytes ? layer->row_bytes - column : nbytes;
            memcpy(to, bytes, (size_t)n);
            c->filled += n;
            if (c->filled % layer->piece_bytes == 0 && c->right[c->part] == piece)
                c->right[c->part] += is_right(b, state, part->layer, part->start + piece, 0);
        }
        if (gap <= 0 && c->filled == part->pieces * layer->piece_bytes) {
            c->part++;
            c->filled = 0;
        }
        c->at += n;
        bytes += n;
        nbytes -= n;
    }
    c->at += nbytes;
    pass();
    b->release(state);
    return c->part;
}

/* Return the check of one piece: what `native.py` compares with Python's before it uses any of this. */
int headstart_check(const Batch *b, const uint8_t *prefix, const uint8_t *data, int64_t nbytes, uint8_t *out)
{
    void *state = b->create();
    if (!state)
        return NO_MEMORY;
    b->reset(state);
    b->update(state, prefix, PREFIX_BYTES);
    b->update(state, data, (size_t)nbytes);
    canonical(b->digest_of(state), out);
    b->release(state);
    return NONE_LEFT;
}
