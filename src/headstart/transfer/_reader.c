/* Reads and verifies a batch of requests without the interpreter: `native.py` fills the tables, several threads call `work`.

   Promises: at most one request a thread is in flight; a piece is counted only after its check was right; a request that could
   not be read, or whose check differs, or that is no longer wanted as a whole, is handed back and nothing is said about it.
   Leaves to Python: what is read, what a failure means, who is told. No Python.h: one build serves every interpreter, and the
   hash is the one that the xxhash package brings, called by address. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

enum { ALIGNMENT = 4096, MAX_PARTS = 1024, PREFIX_BYTES = 68 };
enum { NONE_LEFT = 0, LAYER_ENDED = 1, HANDED_BACK = 2, TIME_IS_UP = 3, BAD_TABLE = 4 };

typedef struct { uint64_t low, high; } Hash;

typedef struct {            /* piece p of a layer goes to address + p * piece_stride, as `rows` rows */
    uint8_t *address;
    int64_t piece_bytes, piece_stride, rows, row_bytes, row_stride;
    int64_t direct;         /* every row's address and length suit direct I/O */
} Layer;

typedef struct { int64_t offset; int32_t layer, start, pieces, unused; } Part;   /* offset: in the file */

typedef struct { int32_t descriptor, first_part, parts, start, pieces, unused; } Request;

typedef struct {
    const Layer *layers;
    const Part *parts;
    const Request *requests;
    int64_t request_count, piece_count;
    const uint8_t *digest;      /* 32 bytes */
    const uint8_t *keys;        /* [pieces][32] */
    const uint8_t *checks;      /* [layers][pieces][16] */
    int64_t *left;              /* [layers] requests that have not ended */
    int64_t *pieces_ended;      /* [layers] by this reader; read once `left` is 0 */
    int64_t *bytes_read;        /* [layers] */
    const int64_t *limit;       /* pieces from here on are not wanted any more */
    const int64_t *cancelled;   /* not 0: hand everything back */
    const int64_t *closing;     /* not 0: hand everything back */
    int64_t next;
    void *(*create)(void);
    int (*release)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    Hash (*digest_of)(const void *);
} Batch;

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

/* Where the rows of a part lie in the destination, neighbours joined; returns how many, or -1 if they are more than `room`. */
static int rows_of(const Layer *layer, const Part *part, struct iovec *rows, int room)
{
    int count = 0;
    for (int64_t piece = part->start; piece < (int64_t)part->start + part->pieces; piece++)
        for (int64_t row = 0; row < layer->rows; row++) {
            uint8_t *at = layer->address + piece * layer->piece_stride + row * layer->row_stride;
            if (count && (uint8_t *)rows[count - 1].iov_base + rows[count - 1].iov_len == at) {
                rows[count - 1].iov_len += (size_t)layer->row_bytes;
                continue;
            }
            if (count == room)
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

/* Check every piece of a part, at `staged` or else where it lies in the destination. */
static int verify(const Batch *b, void *state, const Part *part, const uint8_t *staged)
{
    const Layer *layer = &b->layers[part->layer];
    uint8_t prefix[PREFIX_BYTES], check[16];
    memcpy(prefix, b->digest, 32);
    for (int i = 0; i < 4; i++)
        prefix[64 + i] = (uint8_t)((uint32_t)part->layer >> (8 * i));
    for (int64_t i = 0; i < part->pieces; i++) {
        int64_t piece = part->start + i;
        memcpy(prefix + 32, b->keys + piece * 32, 32);
        b->reset(state);
        b->update(state, prefix, PREFIX_BYTES);
        if (staged)
            b->update(state, staged + i * layer->piece_bytes, (size_t)layer->piece_bytes);
        else
            for (int64_t row = 0; row < layer->rows; row++)
                b->update(state, layer->address + piece * layer->piece_stride + row * layer->row_stride, (size_t)layer->row_bytes);
        canonical(b->digest_of(state), check);
        if (memcmp(check, b->checks + (part->layer * b->piece_count + piece) * 16, 16))
            return 0;
    }
    return 1;
}

static void copy_out(const Layer *layer, const Part *part, const uint8_t *from)
{
    for (int64_t piece = part->start; piece < (int64_t)part->start + part->pieces; piece++)
        for (int64_t row = 0; row < layer->rows; row++, from += layer->row_bytes)
            memcpy(layer->address + piece * layer->piece_stride + row * layer->row_stride, from, (size_t)layer->row_bytes);
}

/* Read a request and verify it; 1 only if every byte is right and where it belongs. */
static int fetch(const Batch *b, const Request *request, void *state, uint8_t *staging, int64_t staging_bytes)
{
    const Part *parts = b->parts + request->first_part;
    struct iovec rows[MAX_PARTS];
    int count = 0;
    int64_t start = parts[0].offset, end = start;
    for (int i = 0; i < request->parts; i++) {
        const Layer *layer = &b->layers[parts[i].layer];
        if (count >= 0 && layer->direct && parts[i].offset == end && start % ALIGNMENT == 0) {
            int more = rows_of(layer, &parts[i], rows + count, MAX_PARTS - count);
            count = more < 0 ? -1 : count + more;
        } else
            count = -1;
        end = parts[i].offset + parts[i].pieces * layer->piece_bytes;
    }
    const uint8_t *staged = 0;
    if (count >= 0) {
        if (!read_exactly(request->descriptor, rows, count, end - start, start))
            return 0;
    } else {
        int64_t before = start % ALIGNMENT;
        int64_t nbytes = (before + end - start + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        if (nbytes > staging_bytes)
            return 0;
        struct iovec whole = {staging, (size_t)nbytes};
        if (!read_exactly(request->descriptor, &whole, 1, nbytes, start - before))
            return 0;
        staged = staging + before;
    }
    for (int i = 0; i < request->parts; i++)
        if (!verify(b, state, &parts[i], staged ? staged + (parts[i].offset - start) : 0))
            return 0;
    for (int i = 0; staged && i < request->parts; i++)
        copy_out(&b->layers[parts[i].layer], &parts[i], staged + (parts[i].offset - start));
    return 1;
}

/* Take requests in order until a layer has ended, one has to be handed back (`*handed`, else -1), or `budget_ns` is over. */
int headstart_work(Batch *b, uint8_t *staging, int64_t staging_bytes, int64_t budget_ns, int64_t *handed)
{
    int64_t until = now_ns() + budget_ns;
    int outcome = NONE_LEFT;
    void *state = b->create();
    *handed = -1;
    while (state && outcome == NONE_LEFT) {
        int64_t number = __atomic_fetch_add(&b->next, 1, __ATOMIC_RELAXED);
        if (number >= b->request_count)
            break;
        const Request *request = &b->requests[number];
        int64_t limit = __atomic_load_n(b->limit, __ATOMIC_ACQUIRE);
        int wanted = request->start < limit, good = 0;
        if (wanted && request->start + request->pieces <= limit && !__atomic_load_n(b->cancelled, __ATOMIC_ACQUIRE) &&
            !__atomic_load_n(b->closing, __ATOMIC_ACQUIRE))
            good = fetch(b, request, state, staging, staging_bytes);
        if (wanted && !good) {
            *handed = number;
            outcome = HANDED_BACK;
        }
        for (int i = 0; i < request->parts; i++) {
            const Part *part = &b->parts[request->first_part + i];
            if (!wanted || good)
                __atomic_fetch_add(&b->pieces_ended[part->layer], part->pieces, __ATOMIC_RELAXED);
            if (good)
                __atomic_fetch_add(&b->bytes_read[part->layer], part->pieces * b->layers[part->layer].piece_bytes, __ATOMIC_RELAXED);
            if (__atomic_fetch_sub(&b->left[part->layer], 1, __ATOMIC_ACQ_REL) == 1 && outcome == NONE_LEFT)
                outcome = LAYER_ENDED;
        }
        if (outcome == NONE_LEFT && now_ns() >= until)
            outcome = TIME_IS_UP;
    }
    if (state)
        b->release(state);
    return state ? outcome : BAD_TABLE;
}

/* Return the check of one piece: what `native.py` compares with Python's before it uses any of this. */
int headstart_check(const Batch *b, const uint8_t *prefix, const uint8_t *data, int64_t nbytes, uint8_t *out)
{
    void *state = b->create();
    if (!state)
        return BAD_TABLE;
    b->reset(state);
    b->update(state, prefix, PREFIX_BYTES);
    b->update(state, data, (size_t)nbytes);
    canonical(b->digest_of(state), out);
    b->release(state);
    return NONE_LEFT;
}
