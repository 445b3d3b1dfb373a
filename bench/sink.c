/* An S3 server that costs next to nothing, so that a benchmark sees the client: bodies are dropped in the kernel
 * (MSG_TRUNC, tcp(7)) and reads are answered with zeros by sendfile. Sizes, ETags and objects below KEEP_BYTES (manifests)
 * are kept; conditional PUT, parts, copies, ranges, listings and deletions work as far as checkpoint tools use them.
 * An ETag never looks like an MD5 sum, which some clients would compare. No signature or checksum is looked at; checksums in a request's head are told back. A thread for each connection.
 *
 *   cc -O2 -pthread sink.c -o sink && ./sink        prints the port that it listens on (loopback), serves until killed
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#define KEEP_BYTES (1L << 20)
#define ZEROS_BYTES (64L << 20)
#define HEAD_BYTES (64 << 10)
#define MOST_PARTS 10001
#define MOST_OBJECTS 4096
#define MOST_UPLOADS 4096

struct object {
	char *key;
	char *kept; /* the bytes, or NULL: zeros */
	long size;
	unsigned long tag;
};

struct upload {
	char *key;
	long parts[MOST_PARTS];
};

static struct object objects[MOST_OBJECTS];
static struct upload *uploads[MOST_UPLOADS]; /* the id is the index */
static int object_count, upload_count;
static unsigned long last_tag;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int zeros_fd;

struct request {
	int fd;
	char head[HEAD_BYTES + 1];
	size_t have, head_length; /* bytes in `head`; those before the body */
	char method[16], key[4096], query[4096];
	long length; /* of the body */
};

/* ---------------------------------------------------------------- bytes */

static int send_all(int fd, const char *bytes, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
		if (sent <= 0)
			return -1;
		bytes += sent;
		length -= sent;
	}
	return 0;
}

static int send_zeros(int fd, long length)
{
	while (length) {
		off_t from = 0;
		ssize_t sent = sendfile(fd, zeros_fd, &from, length < ZEROS_BYTES ? length : ZEROS_BYTES);
		if (sent <= 0)
			return -1;
		length -= sent;
	}
	return 0;
}

/* Takes the body off the connection: into `into` (or nowhere where it is NULL), and what came after it to the front. */
static int take_body(struct request *request, char *into)
{
	size_t extra = request->have - request->head_length;
	size_t early = extra < (size_t)request->length ? extra : (size_t)request->length;
	long left = request->length - early;

	if (into) {
		memcpy(into, request->head + request->head_length, early);
		into += early;
	}
	memmove(request->head, request->head + request->head_length + early, extra - early);
	request->have = extra - early;
	while (left) {
		ssize_t got = recv(request->fd, into, left < (8 << 20) ? left : (8 << 20), into ? 0 : MSG_TRUNC);
		if (got <= 0)
			return -1;
		left -= got;
		if (into)
			into += got;
	}
	return 0;
}

static void unescape(char *text)
{
	char *to = text;
	unsigned value;

	for (; *text; text++) {
		if (*text == '%' && sscanf(text + 1, "%2x", &value) == 1) {
			*to++ = value;
			text += 2;
		} else {
			*to++ = *text;
		}
	}
	*to = 0;
}

/* A field of the head, copied into `value`; returns whether it is there. */
static int field(const struct request *request, const char *name, char *value, size_t room)
{
	char wanted[128];
	snprintf(wanted, sizeof wanted, "\r\n%s:", name);
	const char *at = strcasestr(request->head, wanted);
	if (!at || at >= request->head + request->head_length)
		return 0;
	at += strlen(wanted);
	at += strspn(at, " ");
	size_t length = strcspn(at, "\r");
	snprintf(value, room, "%.*s", (int)length, at);
	return 1;
}

/* An argument of the query, unescaped; returns whether it is there. */
static int argument(const struct request *request, const char *name, char *value, size_t room)
{
	const char *at = request->query;
	size_t length = strlen(name);

	while (*at) {
		if (!strncmp(at, name, length) && strchr("=&", at[length])) {
			at += length + (at[length] == '=');
			snprintf(value, room, "%.*s", (int)strcspn(at, "&"), at);
			unescape(value);
			return 1;
		}
		at += strcspn(at, "&");
		at += *at == '&';
	}
	return 0;
}

static int answer(struct request *request, const char *status, const char *fields, const char *body)
{
	char head[4096];
	int length = snprintf(head, sizeof head, "HTTP/1.1 %s\r\nServer: sink\r\nContent-Length: %zu\r\n%s\r\n", status,
			      strlen(body), fields);
	if (send_all(request->fd, head, length))
		return -1;
	return strcmp(request->method, "HEAD") ? send_all(request->fd, body, strlen(body)) : 0;
}

static int fail(struct request *request, const char *status, const char *code)
{
	char body[512];
	snprintf(body, sizeof body, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>%s</Message></Error>", code, status);
	return answer(request, status, "Content-Type: application/xml\r\n", body);
}

/* ---------------------------------------------------------------- objects; under the lock */

static struct object *find(const char *key)
{
	for (int i = 0; i < object_count; i++)
		if (objects[i].key && !strcmp(objects[i].key, key))
			return &objects[i];
	return NULL;
}

static void drop(struct object *object)
{
	free(object->key);
	free(object->kept);
	*object = (struct object){0};
}

static unsigned long keep(const char *key, char *bytes, long size)
{
	struct object *object = find(key);

	if (object)
		drop(object);
	for (int i = 0; !object && i < object_count; i++)
		if (!objects[i].key)
			object = &objects[i];
	if (!object) {
		if (object_count == MOST_OBJECTS)
			abort();
		object = &objects[object_count++];
	}
	*object = (struct object){strdup(key), bytes, size, ++last_tag};
	return object->tag;
}

/* ---------------------------------------------------------------- requests */

static int put(struct request *request)
{
	char text[4096], fields[4096], value[512];
	long size = request->length;
	char *kept = NULL;
	unsigned long tag = 0;
	int is_there = 0;

	if (field(request, "x-amz-decoded-content-length", text, sizeof text))
		size = atol(text);
	int is_new_only = field(request, "if-none-match", text, sizeof text);
	int is_part = argument(request, "partNumber", value, sizeof value);
	int number = is_part ? atoi(value) : 0;
	int id = argument(request, "uploadId", value, sizeof value) ? atoi(value) : 0;
	int length = snprintf(fields, sizeof fields, "%s", "");
	for (const char *name[] = {"x-amz-checksum-crc64nvme", "x-amz-checksum-crc32", "x-amz-checksum-crc32c", NULL}, **each = name;
	     *each; each++)
		if (field(request, *each, value, sizeof value))
			length += snprintf(fields + length, sizeof fields - length, "%s: %s\r\n", *each, value);
	int is_copy = field(request, "x-amz-copy-source", text, sizeof text);
	if (!is_part && !is_copy && request->length <= KEEP_BYTES)
		kept = calloc(1, request->length + 1);
	if (take_body(request, kept))
		return -1;

	pthread_mutex_lock(&lock);
	if (is_part) {
		if (id < upload_count && number < MOST_PARTS && uploads[id])
			uploads[id]->parts[number] = size;
		tag = size;
	} else if (is_copy) {
		unescape(text);
		struct object *from = find(text + (text[0] == '/'));
		if (from) {
			char *bytes = from->kept ? memcpy(malloc(from->size + 1), from->kept, from->size + 1) : NULL;
			tag = keep(request->key, bytes, from->size);
		}
	} else {
		is_there = is_new_only && find(request->key);
		if (!is_there)
			tag = keep(request->key, kept, size);
	}
	pthread_mutex_unlock(&lock);
	if (is_there) {
		free(kept);
		return fail(request, "412 Precondition Failed", "PreconditionFailed");
	}
	if (is_copy) {
		if (!tag)
			return fail(request, "404 Not Found", "NoSuchKey");
		snprintf(text, sizeof text,
			 "<?xml version=\"1.0\"?><CopyObjectResult><ETag>\"%032lx-1\"</ETag>"
			 "<LastModified>2026-01-01T00:00:00.000Z</LastModified></CopyObjectResult>",
			 tag);
		return answer(request, "200 OK", "Content-Type: application/xml\r\n", text);
	}
	snprintf(fields + length, sizeof fields - length, "ETag: \"%032lx-1\"\r\n", tag);
	return answer(request, "200 OK", fields, "");
}

static int post(struct request *request)
{
	char text[16384], value[64];
	char *body = calloc(1, request->length + 1);
	int broken = take_body(request, body);
	const char *bucket_end = strchr(request->key, '/');
	int bucket_length = bucket_end ? (int)(bucket_end - request->key) : (int)strlen(request->key);

	if (broken) {
		free(body);
		return -1;
	}
	pthread_mutex_lock(&lock);
	if (argument(request, "uploads", value, sizeof value)) {
		if (upload_count == MOST_UPLOADS)
			abort();
		uploads[upload_count] = calloc(1, sizeof *uploads[0]);
		uploads[upload_count]->key = strdup(request->key);
		snprintf(text, sizeof text,
			 "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>%.*s</Bucket><Key>%s</Key>"
			 "<UploadId>%d</UploadId></InitiateMultipartUploadResult>",
			 bucket_length, request->key, bucket_end ? bucket_end + 1 : "", upload_count++);
	} else if (argument(request, "uploadId", value, sizeof value)) {
		int id = atoi(value);
		long size = 0;
		unsigned long tag = 0;
		if (id < upload_count && uploads[id]) {
			for (int part = 1; part < MOST_PARTS; part++)
				size += uploads[id]->parts[part];
			tag = keep(request->key, NULL, size);
			free(uploads[id]->key);
			free(uploads[id]);
			uploads[id] = NULL;
		}
		snprintf(text, sizeof text,
			 "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Location>/</Location><Bucket>%.*s</Bucket>"
			 "<Key>%s</Key><ETag>\"%032lx-1\"</ETag></CompleteMultipartUploadResult>",
			 bucket_length, request->key, bucket_end ? bucket_end + 1 : "", tag);
	} else { /* DeleteObjects */
		for (char *at = body; (at = strstr(at, "<Key>"));) {
			char key[8192];
			at += 5;
			snprintf(key, sizeof key, "%.*s/%.*s", bucket_length, request->key, (int)strcspn(at, "<"), at);
			struct object *object = find(key);
			if (object)
				drop(object);
		}
		snprintf(text, sizeof text, "<?xml version=\"1.0\"?><DeleteResult></DeleteResult>");
	}
	pthread_mutex_unlock(&lock);
	free(body);
	return answer(request, "200 OK", "Content-Type: application/xml\r\n", text);
}

static int by_key(const void *one, const void *other)
{
	return strcmp(*(char *const *)one, *(char *const *)other);
}

/* ListObjectsV2, all in one page. */
static int list(struct request *request)
{
	char prefix[4096] = "", delimiter[16] = "", full[8300], *last = NULL;
	const char *names[MOST_OBJECTS];
	int found = 0, count = 0;
	size_t bucket_length = strcspn(request->key, "/"), room = 1 << 20, length = 0;
	char *body = malloc(room);

	argument(request, "prefix", prefix, sizeof prefix);
	argument(request, "delimiter", delimiter, sizeof delimiter);
	snprintf(full, sizeof full, "%.*s/%s", (int)bucket_length, request->key, prefix);
	pthread_mutex_lock(&lock);
	for (int i = 0; i < object_count; i++)
		if (objects[i].key && !strncmp(objects[i].key, full, strlen(full)))
			names[found++] = objects[i].key;
	qsort(names, found, sizeof names[0], by_key);
	length += sprintf(body, "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated><MaxKeys>1000</MaxKeys>");
	for (int i = 0; i < found && length < room - 8192; i++) {
		const char *key = names[i] + bucket_length + 1, *cut = *delimiter ? strstr(key + strlen(prefix), delimiter) : NULL;
		if (cut) {
			size_t size = cut - key + strlen(delimiter);
			if (last && strlen(last) == size && !strncmp(last, key, size))
				continue;
			free(last);
			last = strndup(key, size);
			length += sprintf(body + length, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", last);
		} else {
			struct object *object = find(names[i]);
			length += sprintf(body + length,
					  "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
					  "<ETag>\"%032lx-1\"</ETag><Size>%ld</Size><StorageClass>STANDARD</StorageClass></Contents>",
					  key, object->tag, object->size);
		}
		count++;
	}
	pthread_mutex_unlock(&lock);
	sprintf(body + length, "<KeyCount>%d</KeyCount></ListBucketResult>", count);
	free(last);
	int broken = answer(request, "200 OK", "Content-Type: application/xml\r\n", body);
	free(body);
	return broken;
}

static int get(struct request *request)
{
	char text[4096], part[128], *kept = NULL;
	long first = 0, last;

	if (take_body(request, NULL))
		return -1;
	if (argument(request, "uploads", text, sizeof text))
		return answer(request, "200 OK", "Content-Type: application/xml\r\n",
			      "<?xml version=\"1.0\"?><ListMultipartUploadsResult></ListMultipartUploadsResult>");
	if (argument(request, "location", text, sizeof text))
		return answer(request, "200 OK", "Content-Type: application/xml\r\n",
			      "<?xml version=\"1.0\"?><LocationConstraint></LocationConstraint>");
	if (!strchr(request->key, '/') || !strchr(request->key, '/')[1]) {
		if (!strcmp(request->method, "HEAD"))
			return answer(request, "200 OK", "", "");
		return list(request);
	}
	pthread_mutex_lock(&lock);
	struct object *object = find(request->key), copy = object ? *object : (struct object){0};
	if (object && object->kept)
		kept = memcpy(malloc(object->size + 1), object->kept, object->size + 1);
	pthread_mutex_unlock(&lock);
	if (!object)
		return fail(request, "404 Not Found", "NoSuchKey");

	last = copy.size - 1;
	int is_ranged = field(request, "range", text, sizeof text) && !strncmp(text, "bytes=", 6);
	if (is_ranged && text[6] == '-') {
		first = copy.size - atol(text + 7);
	} else if (is_ranged) {
		char *end;
		first = strtol(text + 6, &end, 10);
		if (end[0] == '-' && end[1])
			last = atol(end + 1) < last ? atol(end + 1) : last;
	}
	first = first < 0 ? 0 : first;
	long length = last - first + 1;
	if (is_ranged && length <= 0 && copy.size) {
		free(kept);
		return fail(request, "416 Range Not Satisfiable", "InvalidRange");
	}
	snprintf(part, sizeof part, "Content-Range: bytes %ld-%ld/%ld\r\n", first, last, copy.size);
	int size = snprintf(text, sizeof text,
			    "HTTP/1.1 %s\r\nServer: sink\r\nETag: \"%032lx-1\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
			    "Accept-Ranges: bytes\r\nContent-Type: binary/octet-stream\r\nContent-Length: %ld\r\n%s\r\n",
			    is_ranged ? "206 Partial Content" : "200 OK", copy.tag, length, is_ranged ? part : "");
	int broken = send_all(request->fd, text, size);
	if (!broken && strcmp(request->method, "HEAD"))
		broken = kept ? send_all(request->fd, kept + first, length) : send_zeros(request->fd, length);
	free(kept);
	return broken;
}

static int delete(struct request *request)
{
	char value[64];

	if (take_body(request, NULL))
		return -1;
	if (!argument(request, "uploadId", value, sizeof value)) {
		pthread_mutex_lock(&lock);
		struct object *object = find(request->key);
		if (object)
			drop(object);
		pthread_mutex_unlock(&lock);
	}
	return answer(request, "204 No Content", "", "");
}

/* Reads a head; returns whether there was one. */
static int next(struct request *request)
{
	char *end, value[64], target[8192];

	while (request->head[request->have] = 0, !(end = strstr(request->head, "\r\n\r\n"))) {
		if (request->have == HEAD_BYTES)
			return 0;
		ssize_t got = recv(request->fd, request->head + request->have, HEAD_BYTES - request->have, 0);
		if (got <= 0)
			return 0;
		request->have += got;
	}
	request->head_length = end + 4 - request->head;
	if (sscanf(request->head, "%15s /%8191s", request->method, target) < 1)
		return 0;
	char *question = strchr(target, '?');
	snprintf(request->query, sizeof request->query, "%s", question ? question + 1 : "");
	snprintf(request->key, sizeof request->key, "%.*s", (int)strcspn(target, "?"), target);
	unescape(request->key);
	request->length = field(request, "content-length", value, sizeof value) ? atol(value) : 0;
	if (field(request, "transfer-encoding", value, sizeof value)) {
		fail(request, "501 Not Implemented", "NotImplemented");
		return 0;
	}
	if (field(request, "expect", value, sizeof value) && send_all(request->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25))
		return 0;
	return 1;
}

static void *serve(void *argument)
{
	struct request *request = calloc(1, sizeof *request);
	int one = 1, broken = 0;

	request->fd = (int)(long)argument;
	setsockopt(request->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	while (!broken && next(request)) {
		if (!strcmp(request->method, "PUT"))
			broken = put(request);
		else if (!strcmp(request->method, "POST"))
			broken = post(request);
		else if (!strcmp(request->method, "DELETE"))
			broken = delete(request);
		else
			broken = get(request);
	}
	close(request->fd);
	free(request);
	return NULL;
}

int main(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	signal(SIGPIPE, SIG_IGN);
	zeros_fd = memfd_create("zeros", 0);
	if (ftruncate(zeros_fd, ZEROS_BYTES) || fallocate(zeros_fd, 0, 0, ZEROS_BYTES)) {
		perror("sink: memory");
		return 1;
	}
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 512) ||
	    getsockname(listener, (struct sockaddr *)&address, &length)) {
		perror("sink: listen");
		return 1;
	}
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		pthread_t thread;
		if (fd < 0)
			continue;
		if (pthread_create(&thread, NULL, serve, (void *)(long)fd))
			close(fd);
		else
			pthread_detach(thread);
	}
}
