/* Attention of one layer over a packed batch in float32: what `kernel.py` puts in tables is computed by all threads at once.

   Promises: exact to rounding, no approximation of any kind; a row that sees a NaN, or a score that is infinite, becomes NaN; the
   same call gives the same bits for the same number of threads; nothing static is written, so several threads may be in here.
   Leaves to Python: which rows see which keys (parts), memory, bounds. No Python.h and no tensor library: pointers and strides.

   The way of the numbers. Query heads that share a KV head are folded into rows, token by token. A *lane* of a vector is a row,
   so neither K nor V is ever packed, transposed or repeated: they are read where they lie, a number at a time, and each number
   meets a vector of rows. Maxima and sums of softmax then run down the lanes without a step across them.

       Qt [width][rows] ─┐ packed once, scaled            for each 64 keys:   S[key][rows]  = sum over width of K[key][x] · Qt[x]
       K  [keys][width] ─┼─▶ S [64][rows] ─▶ P in place                       P             = 2^(S - max), old sums rescaled
       V  [keys][width] ─┴─▶ Ot [width][rows]                                 Ot[x][rows]  += sum over keys of V[key][x] · P[key]

   The vector code is in _attention_tile.h and compiled once for each kind of processor; the best one is chosen when it runs.

   A task is a KV head, up to ROWS rows of a part, and a run of its keys. Threads take tasks from a counter, so one that was
   interrupted delays nobody by more than a task. Each task leaves a *partial*: sums that are not divided yet, their maximum and
   their weight. In the end the partials of each row are merged, which is how a shared prefix and a request's own keys, or
   runs of keys that several threads took, become one answer. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { KEYS = 64,                   /* of a block: what it needs of K, V, Qt, S and Ot is in the nearest caches */
       ROWS = 192,                  /* of a task at most, a multiple of 3 vectors of any kind */
       CACHED = 1 << 15,            /* numbers of Qt and Ot of a task, 128 KiB: a part of the second-level cache */
       LEAST_RUN = 256,             /* keys; cutting shorter runs costs more than it brings */
       TASKS_A_THREAD = 6,
       SMALL_MERGE = 1 << 14 };     /* numbers; waking a thread takes longer than merging them */

typedef struct {            /* rows of the batch against keys at positions at … at+count-1; a row sees none behind its own position */
    const float *keys, *values;                     /* of KV head 0, at position `at` */
    int64_t key_head, value_head;                   /* strides, in numbers as all strides here */
    int64_t count, at;
    int64_t first, rows;                            /* its rows: places[first … first+rows-1], in order of position */
    int64_t runs, first_task, first_partial;        /* set by `plan` */
} Part;

typedef struct { int32_t row, position; } Place;   /* a row of the batch, and its token's position */

typedef struct {            /* a row of the output, and its places in one part or two; part -1: none */
    int32_t row, part[2], place[2];
} Cover;

typedef struct {            /* new keys and values of rows start … start+count-1, and where they are kept from now on */
    float *keys, *values;
    int64_t key_head, value_head, start, count;
} Write;

typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    const float *query, *key, *value;               /* of the batch: query head h of row r at query + h * query_head + r * query_row */
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    float *out;                                     /* [rows][heads][value_width] */
    const float *sinks;                             /* a score for each query head that has no value, or NULL */
    int64_t kv_heads, group, key_width, value_width, window;     /* window: keys that a row sees, itself included; 0: all */
    int64_t kept_key_row, kept_value_row;           /* strides of parts and writes */
    double scale;
    const Part *parts;
    const Place *places;
    const Cover *covers;
    const Write *writes;
    int64_t part_count, cover_count, write_count;
    int64_t threads, lanes;                         /* lanes: rows of a vector, as `headstart_attention_lanes` says or fewer */
    int64_t tasks, partials, thread_numbers;        /* set by `plan`, which may also lower `lanes` */
    float *scratch;                                 /* as many numbers as `plan` said, at a multiple of 64 bytes */
    Parallel *parallel;                             /* GOMP_parallel of the OpenMP that the tensor library uses, or NULL */
    int64_t next, joined;                           /* task, thread */
} Call;

/* Where a processor's code finds what it works on. Rows of a task are in `tiles` of up to 3 vectors each. */
typedef struct {
    const Call *call;
    const Part *part;
    int64_t head, row, rows, first_key, end_key;    /* `row`: of the part's folded rows */
    float *memory;
    float *sums;                                    /* the partials of these rows: [rows][value_width] */
    float (*weights)[2];                            /* maximum, weight */
} Task;

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f")))
#define NAME(name) name##_avx512
#define LANES 16
#define TILE 8              /* 8 x 3 sums, 3 vectors of rows and a number that is spread: 28 of 32 registers */
#include "_attention_tile.h"
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(name) name##_avx2
#define LANES 8
#define TILE 4              /* 4 x 3 sums, 3 vectors of rows, a number: 16 of 16 */
#include "_attention_tile.h"
#elif defined(__aarch64__)
#define TARGET
#define NAME(name) name##_neon
#define LANES 4
#define TILE 8
#include "_attention_tile.h"
#endif

/* Return how many rows a vector has here; 0: there is no code for this processor. */
int headstart_attention_lanes(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return 16;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8 : 0;
#elif defined(__aarch64__)
    return 4;
#else
    return 0;
#endif
}

/* Rows of a task: enough that keys from memory are used often, few enough that Qt and Ot stay in the second-level cache. */
static int64_t block_rows(const Call *c)
{
    int64_t tile = 3 * c->lanes, tiles = CACHED / (tile * (c->key_width + c->value_width));
    int64_t most = ROWS / tile;
    return tile * (tiles < 1 ? 1 : tiles > most ? most : tiles);
}

/* Cut the call into tasks, and return how many numbers of scratch memory it needs. Keys, values and rows are not looked at. */
int64_t headstart_attention_plan(Call *c, Part *parts)
{
    int64_t most_rows = 0, tasks = 0, partials = 0;
    for (int64_t p = 0; p < c->part_count; p++)
        most_rows = parts[p].rows > most_rows ? parts[p].rows : most_rows;
    if (c->lanes == 16 && most_rows * c->group <= 8)
        c->lanes = 8;       /* half of a vector would be empty, and some processors take two steps for a long one */
    int64_t rows = block_rows(c);
    for (int64_t p = 0; p < c->part_count; p++) {
        Part *part = &parts[p];
        int64_t blocks = (part->rows * c->group + rows - 1) / rows * c->kv_heads;
        int64_t runs = (TASKS_A_THREAD * c->threads + blocks - 1) / blocks, most = part->count / LEAST_RUN;
        part->runs = c->threads == 1 || most < 1 ? 1 : runs > most ? most : runs;
        part->first_task = tasks;
        part->first_partial = partials;
        tasks += blocks * part->runs;
        partials += part->runs * c->kv_heads * part->rows * c->group;
    }
    c->tasks = tasks;
    c->partials = partials;
    c->thread_numbers = KEYS * 3 * c->lanes + 6 * c->lanes + rows * (c->key_width + c->value_width + 2);    /* S, edges, tiles */
    c->thread_numbers = (c->thread_numbers + 15) / 16 * 16;
    return c->threads * c->thread_numbers + partials * (c->value_width + 2);
}

static float *partial_sums(const Call *c) { return c->scratch + c->threads * c->thread_numbers; }

static float (*partial_weights(const Call *c))[2] { return (float (*)[2])(partial_sums(c) + c->partials * c->value_width); }

/* Number of the partial of a part's folded row `row` for a run of its keys. */
static int64_t partial_of(const Call *c, const Part *part, int64_t run, int64_t head, int64_t row)
{
    return part->first_partial + (run * c->kv_heads + head) * part->rows * c->group + row;
}

static void work(void *data)
{
    Call *c = data;
    int64_t rows = block_rows(c), thread = __atomic_fetch_add(&c->joined, 1, __ATOMIC_RELAXED);
    float *memory = c->scratch + thread * c->thread_numbers;
    while (thread < c->threads) {
        int64_t number = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        if (number >= c->tasks)
            return;
        const Part *part = c->parts;
        while (part + 1 < c->parts + c->part_count && part[1].first_task <= number)
            part++;
        int64_t all = part->rows * c->group, blocks = (all + rows - 1) / rows, rest = number - part->first_task;
        /* The rows that see most come first: small tasks are left for the end. */
        int64_t run = rest % part->runs, block = blocks - 1 - rest / part->runs / c->kv_heads;
        int64_t head = rest / part->runs % c->kv_heads, row = block * rows;
        int64_t run_keys = ((part->count + part->runs - 1) / part->runs + KEYS - 1) / KEYS * KEYS;
        int64_t first = run * run_keys, end = first + run_keys;
        int64_t partial = partial_of(c, part, run, head, row);
        Task task = {
            c, part, head, row, all - row < rows ? all - row : rows,
            first < part->count ? first : part->count, end < part->count ? end : part->count,
            memory, partial_sums(c) + partial * c->value_width, partial_weights(c) + partial,
        };
#if defined(__x86_64__)
        if (c->lanes == 16)
            attend_avx512(&task);
        else
            attend_avx2(&task);
#elif defined(__aarch64__)
        attend_neon(&task);
#else
        (void)task;
#endif
    }
}

/* One row and query head: the partials of all its keys as one, divided by their weight. */
static void merge_row(const Call *c, const Cover *cover, int64_t head, int64_t member)
{
    int64_t width = c->value_width, query_head = head * c->group + member;
    float *out = c->out + (cover->row * c->kv_heads * c->group + query_head) * width;
    float most = c->sinks ? c->sinks[query_head] * (float)M_LOG2E : -FLT_MAX, weight = 0;
    for (int side = 0; side < 2 && cover->part[side] >= 0; side++) {
        const Part *part = &c->parts[cover->part[side]];
        for (int64_t run = 0; run < part->runs; run++) {
            float here = partial_weights(c)[partial_of(c, part, run, head, cover->place[side] * c->group + member)][0];
            most = here > most ? here : most;
        }
    }
    if (c->sinks)
        weight = exp2f(c->sinks[query_head] * (float)M_LOG2E - most);
    memset(out, 0, width * sizeof *out);
    for (int side = 0; side < 2 && cover->part[side] >= 0; side++) {
        const Part *part = &c->parts[cover->part[side]];
        for (int64_t run = 0; run < part->runs; run++) {
            int64_t partial = partial_of(c, part, run, head, cover->place[side] * c->group + member);
            const float *sums = partial_sums(c) + partial * width, *stats = partial_weights(c)[partial];
            float share = stats[0] == most ? 1 : exp2f(stats[0] - most);
            weight += share * stats[1];
            for (int64_t x = 0; x < width; x++)
                out[x] += share * sums[x];
        }
    }
    for (int64_t x = 0; x < width; x++)
        out[x] /= weight;
}

static void merge(void *data)
{
    enum { AT_ONCE = 8 };
    Call *c = data;
    for (;;) {
        int64_t first = __atomic_fetch_add(&c->next, AT_ONCE, __ATOMIC_RELAXED);
        if (first >= c->cover_count)
            return;
        for (int64_t i = first; i < first + AT_ONCE && i < c->cover_count; i++)
            for (int64_t head = 0; head < c->kv_heads; head++)
                for (int64_t member = 0; member < c->group; member++)
                    merge_row(c, &c->covers[i], head, member);
    }
}

static void keep(float *to, int64_t to_head, int64_t to_row, const float *from, int64_t from_head, int64_t from_row,
                 int64_t heads, int64_t rows, int64_t width)
{
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++)
            memcpy(to + head * to_head + row * to_row, from + head * from_head + row * from_row, width * sizeof *to);
}

static void together(Call *c, void (*function)(void *), int64_t pieces)
{
    c->next = c->joined = 0;
    if (c->parallel && c->threads > 1 && pieces > 1)
        c->parallel(function, c, (unsigned)(c->threads < pieces ? c->threads : pieces), 0);
    else
        function(c);
}

/* Keep the new keys and values, then attend. */
void headstart_attend(Call *c)
{
    for (const Write *w = c->writes; w < c->writes + c->write_count; w++) {
        keep(w->keys, w->key_head, c->kept_key_row, c->key + w->start * c->key_row, c->key_head, c->key_row, c->kv_heads,
             w->count, c->key_width);
        keep(w->values, w->value_head, c->kept_value_row, c->value + w->start * c->value_row, c->value_head, c->value_row,
             c->kv_heads, w->count, c->value_width);
    }
    together(c, work, c->tasks);
    together(c, merge, c->cover_count * c->kv_heads * c->group * c->value_width <= SMALL_MERGE ? 1 : c->cover_count);
}

/* What `kernel.py` compares before it uses any of this: the meaning's number, raised with every change, and sizes. */
const int64_t headstart_attention_layout[] = {
    1, sizeof(Part), sizeof(Place), sizeof(Cover), sizeof(Write), sizeof(Call),
};
